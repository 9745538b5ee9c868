#pragma once

#include <cstdint>

#include "plugins/common/dtype.h"
#include "plugins/common/slot_table.h"
#include "plugins/common/stream.h"

namespace deltaflash {

/// What attention ops know of the paged KV cache. Token n of a slot sits in page
/// page_table[slot, n / page_size], at row n % page_size.
struct PagedKv {
  void* keys;    // [num_pages, num_kv_heads, page_size, head_dim], `dtype`: this layer's
  void* values;  // as keys
  const std::int32_t* page_table;  // [num_slots, max_pages], -1 where no page is held
  std::int64_t max_pages;
  std::int64_t page_size;
  std::int64_t num_kv_heads;
  std::int64_t head_dim;
  DType dtype;
};

/// q/k norm, partial interleaved M-RoPE and the KV write of a full-attention layer.
/// `qkv` holds per token: for each query head its query (head_dim) and its gate (head_dim), then
/// all keys, then all values. q and k get an RMSNorm over head_dim (1 + weight), then the first
/// rotary_dim of their dims are rotated in halves layout; frequency j reads position axis
///   1 if j % 3 == 1 and j < 3 * section[1];  2 if j % 3 == 2 and j < 3 * section[2];  else 0.
/// k and v of row token i are written at kv index table[slot].kv_len + i, unless no page is held
/// there. Angles in fp32. Nothing is written for a padded row.
struct RotaryKvWrite {
  const void* qkv;  // token t at qkv + t * qkv_stride elements
  std::int64_t qkv_stride;
  const float* q_norm;            // [head_dim]
  const float* k_norm;            // [head_dim]
  const float* inv_freq;          // [rotary_dim / 2]
  const std::int32_t* positions;  // [3, num_tokens]: time, height, width
  std::int32_t section[3];        // frequencies per axis; their sum is rotary_dim / 2
  void* q_out;                    // [num_tokens, num_heads, head_dim], `dtype`
  PagedKv kv;
  const SlotState* table;
  RowBatch rows;
  std::int64_t num_heads;
  std::int64_t rotary_dim;
  float attention_factor;  // multiplies cos and sin (YaRN); 1 otherwise
  float eps;
  DType dtype;
};

namespace cpu {
/// Throws std::invalid_argument for a dtype other than float32, an odd rotary_dim or one beyond
/// head_dim, or sections that do not sum to rotary_dim / 2.
void rotary_kv_write(const RotaryKvWrite& args, Stream stream);
}  // namespace cpu

namespace cuda {
/// Enqueues on `stream`, does not synchronise.
/// Throws std::invalid_argument for a dtype other than float32 or a bad shape, CudaError for a
/// refused launch.
void rotary_kv_write(const RotaryKvWrite& args, Stream stream);
}  // namespace cuda
}  // namespace deltaflash
