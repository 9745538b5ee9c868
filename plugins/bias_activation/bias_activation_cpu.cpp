#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "plugins/bias_activation/bias_activation.h"
#include "plugins/common/simd.h"
#include "plugins/common/thread_pool.h"

namespace deltaflash::cpu {
namespace {

using simd::Lanes;

constexpr std::int64_t kGrain = 4 * 1024;  // elements below which a second thread costs more

// v / 2 * (1 + tanh(u)) = v / (1 + e^(-2 u)).
DELTAFLASH_INLINE Lanes gelu_tanh(Lanes v) {
  constexpr float kMinus2Sqrt2OverPi = -1.59576912f;
  const Lanes inner = v * (v * v * 0.044715f + 1.0f);
  return v / (1.0f + simd::exp(inner * kMinus2Sqrt2OverPi));
}

// Where |v| < 1.25, 1 + erf(v / sqrt(2)) with erf(v / sqrt(2)) = v P(v^2), P off by 4e-9; elsewhere
// erfc(|v| / sqrt(2)) = e^-Q(|v|), Q off by 1.3e-10 / erfc. Both are minimax polynomials. Beyond
// 5.8 erfc < 2^-27 stands for what is smaller still.
DELTAFLASH_INLINE Lanes gelu_erf(Lanes v) {
  const Lanes square = v * v;
  Lanes near = square * -1.32905006e-05f + 2.20658461e-04f;
  near = near * square - 2.36542523e-03f;
  near = near * square + 1.99430063e-02f;
  near = near * square - 1.32979974e-01f;
  near = near * square + 7.97884524e-01f;
  near = near * v + 1.0f;

  const Lanes size = v < 0.0f ? -v : v;
  const Lanes end = simd::broadcast(5.8f);
  const Lanes a = size > end ? end : size;
  Lanes far = a * 1.86435727e-06f - 5.42795242e-05f;
  far = far * a + 7.36982154e-04f;
  far = far * a - 6.27787178e-03f;
  far = far * a + 3.82771082e-02f;
  far = far * a + 3.16682428e-01f;
  far = far * a + 7.98680246e-01f;
  far = far * a - 1.72184984e-04f;
  far = simd::exp(-far);
  far = v < 0.0f ? far : 2.0f - far;

  return v * 0.5f * (size < 1.25f ? near : far);
}

template <typename Function>
DELTAFLASH_INLINE void map_row(const float* x, const float* bias, float* out, std::int64_t dim,
                               const Function& function) {
  std::int64_t i = 0;
  for (; i + simd::kLanes <= dim; i += simd::kLanes) {
    simd::store(out + i, function(simd::load(x + i) + simd::load(bias + i)));
  }
  const std::int64_t left = dim - i;
  simd::store(out + i, function(simd::load(x + i, left) + simd::load(bias + i, left)), left);
}

DELTAFLASH_SIMD void add_row(const float* x, const float* bias, float* out, std::int64_t dim) {
  for (std::int64_t i = 0; i < dim; ++i) {
    out[i] = x[i] + bias[i];
  }
}

DELTAFLASH_SIMD void gelu_tanh_row(const float* x, const float* bias, float* out,
                                   std::int64_t dim) {
  map_row(x, bias, out, dim, [](Lanes v) DELTAFLASH_INLINE_LAMBDA { return gelu_tanh(v); });
}

DELTAFLASH_SIMD void gelu_erf_row(const float* x, const float* bias, float* out, std::int64_t dim) {
  map_row(x, bias, out, dim, [](Lanes v) DELTAFLASH_INLINE_LAMBDA { return gelu_erf(v); });
}

using MapRow = void (*)(const float* x, const float* bias, float* out, std::int64_t dim);

MapRow row_of(Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return add_row;
    case Activation::kGeluTanh:
      return gelu_tanh_row;
    case Activation::kGeluErf:
      return gelu_erf_row;
  }
  throw std::invalid_argument("bias_activation: expected an activation, got " +
                              std::to_string(static_cast<int>(activation)));
}

}  // namespace

void bias_activation(const BiasActivation& args, Stream stream) {
  if (args.num_rows < 0 || args.dim <= 0) {
    throw std::invalid_argument("bias_activation: expected num_rows >= 0 and dim > 0, got " +
                                std::to_string(args.num_rows) + " and " + std::to_string(args.dim));
  }
  const MapRow map_row_of = row_of(args.activation);
  const std::int64_t dim = args.dim;
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / dim);
  parallel_for(stream, args.num_rows, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      map_row_of(args.x + row * dim, args.bias, args.out + row * dim, dim);
    }
  });
}

}  // namespace deltaflash::cpu
