#pragma once

#include <cstdint>

#include "plugins/common/dtype.h"
#include "plugins/common/slot_table.h"
#include "plugins/common/stream.h"
#include "plugins/rotary_kv_write/rotary_kv_write.h"

namespace deltaflash {

/// Causal softmax attention over paged KV with a sigmoid output gate, for prefill and verify rows:
///   out[t, h] = softmax(q[t, h] . K^T * scale) V * sigmoid(gate[t, h])
/// Row token i sees the kv indices 0 .. table[slot].kv_len + i (its own included; the KV write runs
/// before). Query head h reads kv head h / (num_heads / num_kv_heads). The softmax runs in fp32
/// over key tiles that are aligned to kv index 0, so a token's result does not depend on the
/// chunking. A kv index without a page is masked. A padded row gets zeros.
struct GatedAttention {
  const void* q;     // [num_tokens, num_heads, head_dim], `dtype`, normed and rotated
  const void* gate;  // gate of token t, head h at gate + t * gate_stride + h * gate_head_stride
  std::int64_t gate_stride;       // elements
  std::int64_t gate_head_stride;  // elements
  void* out;                      // [num_tokens, num_heads, head_dim], `dtype`
  PagedKv kv;
  const SlotState* table;
  RowBatch rows;
  std::int64_t num_heads;
  float scale;  // head_dim^-0.5
  DType dtype;
};

namespace cpu {
/// Throws std::invalid_argument for a dtype other than float32, a head_dim that is no multiple of 8
/// or a num_heads that is no multiple of num_kv_heads.
void gated_attention(const GatedAttention& args, Stream stream);
}  // namespace cpu

namespace cuda {
/// Enqueues on `stream`, does not synchronise.
/// Throws std::invalid_argument for a dtype other than float32, a head_dim that is no multiple of 8
/// or above 256, or a num_heads that is no multiple of the kv heads, CudaError for a refused
/// launch.
void gated_attention(const GatedAttention& args, Stream stream);
}  // namespace cuda
}  // namespace deltaflash
