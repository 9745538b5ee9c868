#pragma once

#include <cstdint>

#include "plugins/common/dtype.h"
#include "plugins/common/stream.h"

namespace deltaflash {

/// out[i] = x[index[i]]: picks the token rows whose logits a step needs.
struct GatherRows {
  const void* x;              // [num_tokens, dim], `dtype`
  const std::int32_t* index;  // [num_out], each in [0, num_tokens)
  void* out;                  // [num_out, dim], `dtype`
  std::int64_t num_out;
  std::int64_t dim;
  DType dtype;
};

namespace cpu {
/// Throws std::invalid_argument for a dim <= 0.
void gather_rows(const GatherRows& args, Stream stream);
}  // namespace cpu

namespace cuda {
/// Enqueues on `stream`, does not synchronise.
/// Throws std::invalid_argument for a dim <= 0, CudaError for a refused launch.
void gather_rows(const GatherRows& args, Stream stream);
}  // namespace cuda
}  // namespace deltaflash
