#pragma once

#include <cstdint>

#include "plugins/common/stream.h"

namespace deltaflash {

enum class Activation : std::uint8_t {
  kNone,
  kGeluTanh,  // v / 2 * (1 + tanh(sqrt(2 / pi) * (v + 0.044715 v^3)))
  kGeluErf,   // v / 2 * (1 + erf(v / sqrt(2)))
};

/// What follows a dense layer: out[t, i] = activation(x[t, i] + bias[i]). `out` may be `x`.
///
/// fp32. kNone rounds once. The GELUs are within 4 * 2^-24 * max(|v|, 1) of the formula at the
/// rounded v = x + bias; they are zero in the limit of a very negative v, not relatively exact.
struct BiasActivation {
  const float* x;     // [num_rows, dim]
  const float* bias;  // [dim]
  float* out;         // [num_rows, dim]
  std::int64_t num_rows;
  std::int64_t dim;
  Activation activation;
};

namespace cpu {
/// Throws std::invalid_argument for num_rows < 0 or dim <= 0.
void bias_activation(const BiasActivation& args, Stream stream);
}  // namespace cpu
}  // namespace deltaflash
