#pragma once

#include <cstdint>

#include "plugins/common/dtype.h"
#include "plugins/common/stream.h"

namespace deltaflash {

/// Rows of the embedding table: out[t] = table[ids[t]]. An id outside [0, vocab_size) gives zeros.
struct Embedding {
  const std::int32_t* ids;  // [num_tokens]
  const BFloat16* table;    // [vocab_size, hidden]
  void* out;                // [num_tokens, hidden], `dtype`
  std::int64_t num_tokens;
  std::int64_t vocab_size;
  std::int64_t hidden;
  DType dtype;
};

namespace cpu {
/// Throws std::invalid_argument for a dtype other than float32 or a hidden <= 0.
void embedding(const Embedding& args, Stream stream);
}  // namespace cpu

namespace cuda {
/// Enqueues on `stream`, does not synchronise.
/// Throws std::invalid_argument for a dtype other than float32 or a hidden <= 0, CudaError for a
/// refused launch.
void embedding(const Embedding& args, Stream stream);
}  // namespace cuda
}  // namespace deltaflash
