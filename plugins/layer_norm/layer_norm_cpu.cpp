#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "plugins/common/simd.h"
#include "plugins/common/thread_pool.h"
#include "plugins/layer_norm/layer_norm.h"

namespace deltaflash::cpu {
namespace {

using simd::Lanes;

constexpr std::int64_t kGrain = 16 * 1024;  // elements below which a second thread costs more

DELTAFLASH_SIMD void norm_row(const float* x, const float* weight, const float* bias, float* out,
                              std::int64_t dim, float eps) {
  const std::int64_t whole = dim / simd::kLanes * simd::kLanes;
  const std::int64_t left = dim - whole;
  Lanes total = simd::load(x + whole, left);
  for (std::int64_t i = 0; i < whole; i += simd::kLanes) {
    total += simd::load(x + i);
  }
  const float mean = simd::sum(total) / static_cast<float>(dim);

  float rest[simd::kLanes] = {};
  for (std::int64_t i = 0; i < left; ++i) {
    rest[i] = x[whole + i] - mean;
  }
  const Lanes difference = simd::load(rest);
  Lanes squares = difference * difference;
  for (std::int64_t i = 0; i < whole; i += simd::kLanes) {
    const Lanes d = simd::load(x + i) - mean;
    squares += d * d;
  }
  const float variance = simd::sum(squares) / static_cast<float>(dim);
  const float inv_deviation = 1.0f / std::sqrt(variance + eps);

  for (std::int64_t i = 0; i < whole; i += simd::kLanes) {
    const Lanes normal = (simd::load(x + i) - mean) * inv_deviation;
    simd::store(out + i, normal * simd::load(weight + i) + simd::load(bias + i));
  }
  simd::store(out + whole,
              difference * inv_deviation * simd::load(weight + whole, left) +
                  simd::load(bias + whole, left),
              left);
}

}  // namespace

void layer_norm(const LayerNorm& args, Stream stream) {
  if (args.num_rows < 0 || args.dim <= 0) {
    throw std::invalid_argument("layer_norm: expected num_rows >= 0 and dim > 0, got " +
                                std::to_string(args.num_rows) + " and " + std::to_string(args.dim));
  }
  const std::int64_t dim = args.dim;
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / dim);
  parallel_for(stream, args.num_rows, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      norm_row(args.x + row * dim, args.weight, args.bias, args.out + row * dim, dim, args.eps);
    }
  });
}

}  // namespace deltaflash::cpu
