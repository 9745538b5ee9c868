#pragma once

#include <cstdint>

#include "plugins/common/stream.h"

namespace deltaflash {

/// Adds a dense layer's output and its bias to the residual stream, in place:
///   residual[t, i] += y[t, i] + bias[i]
/// fp32; y + bias is rounded, then the sum.
struct BiasResidual {
  const float* y;     // [num_rows, dim]
  const float* bias;  // [dim]
  float* residual;    // [num_rows, dim], read and written
  std::int64_t num_rows;
  std::int64_t dim;
};

namespace cpu {
/// Throws std::invalid_argument for num_rows < 0 or dim <= 0.
void bias_residual(const BiasResidual& args, Stream stream);
}  // namespace cpu
}  // namespace deltaflash
