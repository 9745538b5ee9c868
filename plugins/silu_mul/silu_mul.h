#pragma once

#include <cstdint>

#include "plugins/common/dtype.h"
#include "plugins/common/stream.h"

namespace deltaflash {

/// SwiGLU activation: out[t, i] = silu(gate_up[t, i]) * gate_up[t, dim + i], in fp32.
struct SiluMul {
  const void* gate_up;  // [num_tokens, 2 * dim], `dtype`
  void* out;            // [num_tokens, dim], `dtype`
  std::int64_t num_tokens;
  std::int64_t dim;
  DType dtype;
};

namespace cpu {
/// Throws std::invalid_argument for a dtype other than float32 or a dim <= 0.
void silu_mul(const SiluMul& args, Stream stream);
}  // namespace cpu

namespace cuda {
/// Enqueues on `stream`, does not synchronise.
/// Throws std::invalid_argument for a dtype other than float32 or a dim <= 0, CudaError for a
/// refused launch.
void silu_mul(const SiluMul& args, Stream stream);
}  // namespace cuda
}  // namespace deltaflash
