#pragma once

#include <cstdint>

#include "plugins/common/dtype.h"
#include "plugins/common/stream.h"

namespace deltaflash {

/// out[t, n] = sum_k x[t, k] * weight[n, k], accumulated in fp32: the dense kernel of the `cpu`
/// segment provider. Batch-invariant: out[t] has the same bits whatever the other rows are, however
/// many there are and however many threads run.
struct Linear {
  const float* x;      // [num_tokens, in_dim]
  const void* weight;  // [out_dim, in_dim], `weight_dtype`, rows contiguous
  float* out;          // [num_tokens, out_dim]
  std::int64_t num_tokens;
  std::int64_t in_dim;
  std::int64_t out_dim;
  DType weight_dtype = DType::kBFloat16;
};

namespace cpu {
/// Each output adds up 32 products at a time in order of k, then these sums in order. Weights are
/// bfloat16 or float32. Throws std::invalid_argument for another dtype or a dim <= 0.
void linear(const Linear& args, Stream stream);
}  // namespace cpu

namespace cuda {
/// Enqueues on `stream`, does not synchronise.
/// Each output is one sum in order of k: its bits depend on its own x and weight rows alone.
/// Throws std::invalid_argument for an in_dim or out_dim <= 0 or weights other than bfloat16,
/// CudaError for a refused launch.
void linear(const Linear& args, Stream stream);
}  // namespace cuda
}  // namespace deltaflash
