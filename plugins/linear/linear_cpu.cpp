#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "plugins/common/simd.h"
#include "plugins/common/thread_pool.h"
#include "plugins/linear/linear.h"

namespace deltaflash::cpu {
namespace {

// Multiply-adds below which a further thread costs more than it brings.
constexpr std::int64_t kGrain = 1 << 17;

// Weight rows that meet all tokens before the next ones are read: they stay in a core's cache, so
// that the weights come from memory once.
constexpr std::int64_t kBlockRows = 16;

DELTAFLASH_SIMD
void linear_rows(const Linear& args, const float* x, std::int64_t x_stride, std::int64_t begin,
                 std::int64_t end) {
  for (std::int64_t row = begin; row < end; row += kBlockRows) {
    simd::dot_matrix(args.weight + row * args.in_dim, args.in_dim, std::min(kBlockRows, end - row),
                     x, x_stride, args.num_tokens, args.in_dim, args.out + row, args.out_dim);
  }
}

}  // namespace

void linear(const Linear& args, Stream stream) {
  if (args.num_tokens < 0 || args.in_dim <= 0 || args.out_dim <= 0) {
    throw std::invalid_argument(
        "linear: expected num_tokens >= 0, in_dim > 0 and out_dim > 0, got " +
        std::to_string(args.num_tokens) + ", " + std::to_string(args.in_dim) + " and " +
        std::to_string(args.out_dim));
  }
  if (args.num_tokens == 0) {
    return;
  }
  const std::int64_t x_stride = simd::round_up(args.in_dim, simd::kPairs);
  simd::Scratch split(args.num_tokens * x_stride);
  float* x = split.take(args.num_tokens * x_stride);
  for (std::int64_t token = 0; token < args.num_tokens; ++token) {
    simd::split_pairs(args.x + token * args.in_dim, args.in_dim, x + token * x_stride);
  }
  const std::int64_t work_per_row = args.num_tokens * args.in_dim;
  const std::int64_t grain = std::max(kBlockRows, kGrain / work_per_row);
  parallel_for(stream, args.out_dim, grain, [&](std::int64_t begin, std::int64_t end) {
    linear_rows(args, x, x_stride, begin, end);
  });
}

}  // namespace deltaflash::cpu
