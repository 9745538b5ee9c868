#pragma once

#include <cstdint>

#include "plugins/common/dtype.h"
#include "plugins/common/slot_table.h"
#include "plugins/common/stream.h"

namespace deltaflash {

/// Causal depthwise convolution over the q | k | v channels, then SiLU:
///   y[t, c] = silu(sum_j weight[c, j] * x[t - (kernel - 1) + j, c]),  zeros before the sequence
/// Older inputs come from a circular buffer of raw inputs per slot, in which token n of the
/// sequence sits at column n mod ring_cols; a row starts at n = table[slot].kv_len. The row's last
/// ring_cols inputs are written back; nothing moves when drafts are rejected, since the next row
/// starts at the committed length and overwrites them.
struct CausalConv {
  const void* x;          // token t begins at x + t * x_stride elements: [channels]
  std::int64_t x_stride;  // elements between two tokens of x
  const float* weight;    // [channels, kernel]; tap kernel - 1 meets the current token
  void* ring;             // [num_slots, ring_cols, channels], `dtype`: this layer's
  void* out;              // [num_tokens, channels], `dtype`
  const SlotState* table;
  RowBatch rows;
  std::int64_t channels;
  std::int64_t kernel;     // taps, 1 to 16
  std::int64_t ring_cols;  // a power of two >= kernel - 1 + longest verify row
  DType dtype;
};

namespace cpu {
/// Throws std::invalid_argument for a dtype other than float32, a ring that is no power of two or
/// dims that do not fit. Writes zeros to the outputs of a padded row.
void causal_conv(const CausalConv& args, Stream stream);
}  // namespace cpu

namespace cuda {
/// Enqueues on `stream`, does not synchronise.
/// Throws std::invalid_argument for a dtype other than float32, a kernel of more than 16 taps or a
/// ring that is no power of two, CudaError for a refused launch.
void causal_conv(const CausalConv& args, Stream stream);
}  // namespace cuda
}  // namespace deltaflash
