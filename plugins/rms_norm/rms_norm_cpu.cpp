#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "plugins/common/simd.h"
#include "plugins/common/thread_pool.h"
#include "plugins/rms_norm/rms_norm.h"

namespace deltaflash::cpu {
namespace {

using simd::Lanes;

constexpr std::int64_t kGrain = 16 * 1024;  // elements below which a second thread costs more

// The residual row is null where there is none; `out` may be `x`.
DELTAFLASH_SIMD void norm_row(const float* x, float* residual, const float* weight, float* out,
                              std::int64_t dim, float eps, float offset) {
  const std::int64_t whole = dim / 16 * 16;
  const float* sum = x;
  Lanes squares{};
  if (residual != nullptr) {
    for (std::int64_t i = 0; i < whole; i += 16) {
      const Lanes v = simd::load(residual + i) + simd::load(x + i);
      simd::store(residual + i, v);
      squares += v * v;
    }
    const Lanes v = simd::load(residual + whole, dim - whole) + simd::load(x + whole, dim - whole);
    simd::store(residual + whole, v, dim - whole);
    squares += v * v;
    sum = residual;
  } else {
    for (std::int64_t i = 0; i < whole; i += 16) {
      const Lanes v = simd::load(x + i);
      squares += v * v;
    }
    const Lanes v = simd::load(x + whole, dim - whole);
    squares += v * v;
  }
  const float mean = simd::sum(squares) / static_cast<float>(dim);
  const float inv_rms = 1.0f / std::sqrt(mean + eps);
  for (std::int64_t i = 0; i < whole; i += 16) {
    simd::store(out + i, simd::load(sum + i) * inv_rms * (simd::load(weight + i) + offset));
  }
  const Lanes rest = simd::load(sum + whole, dim - whole) * inv_rms *
                     (simd::load(weight + whole, dim - whole) + offset);
  simd::store(out + whole, rest, dim - whole);
}

}  // namespace

void rms_norm(const RmsNorm& args, Stream stream) {
  if (args.dtype != DType::kFloat32) {
    throw std::invalid_argument("rms_norm: expected dtype float32, got " +
                                std::string(name_of(args.dtype)));
  }
  if (args.dim <= 0) {
    throw std::invalid_argument("rms_norm: expected dim > 0, got " + std::to_string(args.dim));
  }
  const auto* x = static_cast<const float*>(args.x);
  auto* residual = static_cast<float*>(args.residual);
  auto* out = static_cast<float*>(args.out);
  const std::int64_t dim = args.dim;
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / dim);
  parallel_for(stream, args.num_tokens, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t token = begin; token < end; ++token) {
      norm_row(x + token * dim, residual == nullptr ? nullptr : residual + token * dim, args.weight,
               out + token * dim, dim, args.eps, args.unit_offset ? 1.0f : 0.0f);
    }
  });
}

}  // namespace deltaflash::cpu
