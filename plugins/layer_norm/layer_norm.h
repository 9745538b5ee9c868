#pragma once

#include <cstdint>

#include "plugins/common/stream.h"

namespace deltaflash {

/// LayerNorm over the last axis:
///   out = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias
/// `out` may be `x`. A row's bits depend on that row alone.
///
/// fp32; the variance is that of the differences, so that a large mean cancels only once. With n =
/// dim / 16 + 8 the mean is off by at most n * 2^-24 * mean(|x|), and so is every difference; the
/// division and the rest add (n + 4) * 2^-24 of |out - bias| and one rounding of out.
struct LayerNorm {
  const float* x;       // [num_rows, dim]
  const float* weight;  // [dim]
  const float* bias;    // [dim]
  float* out;           // [num_rows, dim]
  std::int64_t num_rows;
  std::int64_t dim;
  float eps;
};

namespace cpu {
/// Throws std::invalid_argument for num_rows < 0 or dim <= 0.
void layer_norm(const LayerNorm& args, Stream stream);
}  // namespace cpu
}  // namespace deltaflash
