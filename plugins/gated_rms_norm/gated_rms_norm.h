#pragma once

#include <cstdint>

#include "plugins/common/dtype.h"
#include "plugins/common/stream.h"

namespace deltaflash {

/// The output norm of a Gated DeltaNet layer, per head: norm first, then the gate.
///   out = x / sqrt(mean(x^2) + eps) * weight * silu(z)
/// fp32 inside; the weight is plain (not 1 + weight). `out` may be `x`.
struct GatedRmsNorm {
  const void* x;          // [num_tokens, num_heads, head_dim], `dtype`
  const void* z;          // row t begins at z + t * z_stride elements: [num_heads, head_dim]
  std::int64_t z_stride;  // elements between two tokens of z
  const float* weight;    // [head_dim], shared by all heads
  void* out;              // [num_tokens, num_heads, head_dim], `dtype`
  std::int64_t num_tokens;
  std::int64_t num_heads;
  std::int64_t head_dim;
  float eps;
  DType dtype;
};

namespace cpu {
/// Throws std::invalid_argument for a dtype other than float32 or dims that do not fit.
void gated_rms_norm(const GatedRmsNorm& args, Stream stream);
}  // namespace cpu

namespace cuda {
/// Enqueues on `stream`, does not synchronise.
/// Throws std::invalid_argument for a dtype other than float32 or a bad shape, CudaError for a
/// refused launch.
void gated_rms_norm(const GatedRmsNorm& args, Stream stream);
}  // namespace cuda
}  // namespace deltaflash
