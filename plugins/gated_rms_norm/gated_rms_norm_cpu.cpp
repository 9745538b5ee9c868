#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "plugins/common/simd.h"
#include "plugins/common/thread_pool.h"
#include "plugins/gated_rms_norm/gated_rms_norm.h"

namespace deltaflash::cpu {
namespace {

using simd::kLanes;
using simd::Lanes;

constexpr std::int64_t kGrain = 4096;  // elements below which a further thread does not pay

DELTAFLASH_SIMD
void normalise_heads(const GatedRmsNorm& args, std::int64_t begin, std::int64_t end) {
  const std::int64_t dim = args.head_dim;
  const std::int64_t whole = dim / kLanes * kLanes;
  for (std::int64_t head = begin; head < end; ++head) {
    const std::int64_t token = head / args.num_heads;
    const float* x = static_cast<const float*>(args.x) + head * dim;
    const float* z = static_cast<const float*>(args.z) + token * args.z_stride +
                     (head - token * args.num_heads) * dim;
    float* out = static_cast<float*>(args.out) + head * dim;
    Lanes squares = {};
    for (std::int64_t i = 0; i < whole; i += kLanes) {
      const Lanes at = simd::load(x + i);
      squares += at * at;
    }
    if (whole < dim) {
      const Lanes at = simd::load(x + whole, dim - whole);
      squares += at * at;
    }
    const float mean = simd::sum(squares) / static_cast<float>(dim);
    const float inv_rms = 1.0f / std::sqrt(mean + args.eps);
    for (std::int64_t i = 0; i < whole; i += kLanes) {
      simd::store(out + i, simd::load(x + i) * inv_rms * simd::load(args.weight + i) *
                               simd::silu(simd::load(z + i)));
    }
    if (whole < dim) {
      const std::int64_t left = dim - whole;
      simd::store(out + whole,
                  simd::load(x + whole, left) * inv_rms * simd::load(args.weight + whole, left) *
                      simd::silu(simd::load(z + whole, left)),
                  left);
    }
  }
}

}  // namespace

void gated_rms_norm(const GatedRmsNorm& args, Stream stream) {
  if (args.dtype != DType::kFloat32) {
    throw std::invalid_argument("gated_rms_norm: expected dtype float32, got " +
                                std::string(name_of(args.dtype)));
  }
  if (args.head_dim <= 0 || args.num_heads <= 0 || args.z_stride < args.num_heads * args.head_dim) {
    throw std::invalid_argument(
        "gated_rms_norm: expected num_heads > 0, head_dim > 0 and z_stride >= num_heads * "
        "head_dim, "
        "got " +
        std::to_string(args.num_heads) + ", " + std::to_string(args.head_dim) + " and " +
        std::to_string(args.z_stride));
  }
  const std::int64_t grain = (kGrain + args.head_dim - 1) / args.head_dim;
  parallel_for(stream, args.num_tokens * args.num_heads, grain,
               [&](std::int64_t begin, std::int64_t end) { normalise_heads(args, begin, end); });
}

}  // namespace deltaflash::cpu
