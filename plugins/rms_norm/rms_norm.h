#pragma once

#include <cstdint>

#include "plugins/common/dtype.h"
#include "plugins/common/stream.h"

namespace deltaflash {

/// RMSNorm over the last axis with an optional residual add in front:
///   r = residual + x  (written back to residual),  or x where residual is null
///   out = r / sqrt(mean(r^2) + eps) * (unit_offset ? 1 + weight : weight)
/// Computed in fp32, (1 + weight) included. `out` may be `x`.
struct RmsNorm {
  const void* x;        // [num_tokens, dim], `dtype`
  void* residual;       // [num_tokens, dim], `dtype`, read and written; may be null
  const float* weight;  // [dim]
  void* out;            // [num_tokens, dim], `dtype`
  std::int64_t num_tokens;
  std::int64_t dim;
  float eps;
  bool unit_offset;  // Qwen3.5 stores its norms zero-centred, all but the GDN output norm
  DType dtype;
};

namespace cpu {
/// Throws std::invalid_argument for a dtype other than float32 or a dim <= 0.
void rms_norm(const RmsNorm& args, Stream stream);
}  // namespace cpu

namespace cuda {
/// Enqueues on `stream`, does not synchronise.
/// Throws std::invalid_argument for a dtype other than float32 or a dim <= 0, CudaError for a
/// refused launch.
void rms_norm(const RmsNorm& args, Stream stream);
}  // namespace cuda
}  // namespace deltaflash
