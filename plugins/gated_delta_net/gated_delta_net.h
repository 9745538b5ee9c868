#pragma once

#include <cstdint>

#include "plugins/common/dtype.h"
#include "plugins/common/slot_table.h"
#include "plugins/common/stream.h"

namespace deltaflash {

/// The recurrence of a Gated DeltaNet layer (arXiv:2412.06464), for value head j with state
/// S [V, K] in fp32 and key head j / (num_value_heads / num_key_heads):
///   alpha = exp(-exp(a_log) * softplus(a + dt_bias)),  beta = sigmoid(b)
///   q = q / sqrt(sum(q^2) + 1e-6) / sqrt(K),           k = k / sqrt(sum(k^2) + 1e-6)
///   S <- alpha S;  d = beta (v - S k);  S <- S + d k^T;  o = S q
///
/// Decoding keeps the state in the ReplaySSM form (dao-lab.ai/blog/2026/replayssm): a checkpoint
/// S0 that is written rarely and a ring of records (d, k, log alpha), one a token. Record m of the
/// live ones sits at ring row (ring_base + m) mod ring_rows of the slot; ring_base and
/// ring_history are in the slot table, shared by all layers and moved only by `commit_round`.
struct GatedDeltaNet {
  const void* qkv;  // after conv and SiLU; token t at qkv + t * qkv_stride: [q | k | v]
  std::int64_t qkv_stride;
  const void* ba;  // projections, token t at ba + t * ba_stride: [b | a], 2 * num_value_heads
  std::int64_t ba_stride;
  const float* a_log;    // [num_value_heads]
  const float* dt_bias;  // [num_value_heads]
  float* state;          // S0 [num_slots, num_value_heads, value_dim, key_dim]: this layer's
  void* ring_d;          // [num_slots, num_value_heads, ring_rows, value_dim], `ring_dtype`
  void* ring_k;          // [num_slots, num_key_heads, ring_rows, key_dim], `ring_dtype`
  float* ring_g;         // [num_slots, num_value_heads, ring_rows], log alpha
  void* out;             // [num_tokens, num_value_heads, value_dim], `dtype`
  const SlotState* table;
  RowBatch rows;
  std::int64_t num_key_heads;
  std::int64_t num_value_heads;
  std::int64_t key_dim;
  std::int64_t value_dim;
  std::int64_t ring_rows;  // a power of two >= history_limit + longest row
  std::int64_t
      history_limit;  // L of the flush rule; 0 = absorb at start (L = the row's own length)
  DType dtype;
  DType ring_dtype;
};

/// Whether a row of `row_len` tokens folds the slot's history into the state before it runs. The
/// same rule stands in verify and in commit.
constexpr bool flushes(std::int64_t ring_history, std::int64_t row_len,
                       std::int64_t history_limit) {
  const std::int64_t limit = history_limit == 0 ? row_len : history_limit;
  return ring_history + row_len > limit;
}

namespace cpu {
/// Chunked form (WY / UT transform, spec of arXiv:2412.06464 section 3), chunks of 64 aligned to
/// the sequence: the result does not depend on how a prompt is cut at multiples of 64. A row
/// starts from zeros if table[slot].kv_len is 0 (the slot's state is not read), else from S0; the
/// slot's ring must be empty. Writes S0 once, leaves the ring alone. An empty row touches nothing.
/// Throws std::invalid_argument for a dtype other than float32, dims or strides that do not fit, or
/// a ring that holds records.
void gated_delta_net_prefill(const GatedDeltaNet& args, Stream stream);

/// Window form over S0 + live ring records; appends the row's records after the live ones. Folds
/// the history into S0 first where `flushes` says so: run exactly once between two commits. A row
/// whose slot has kv_len 0 starts from zeros, and writes them to S0, for the next row will read it.
/// What a token gives has the same bits whatever tokens follow it in the row.
/// Throws std::invalid_argument for a dtype (of the ring too) other than float32, dims or strides
/// that do not fit, or a ring too small for history and row.
void gated_delta_net_verify(const GatedDeltaNet& args, Stream stream);

/// The exact state of a slot after its first `num_records` live records, [num_value_heads,
/// value_dim, key_dim], into `out`; changes nothing. The bits are those of a fold of these records.
/// Throws std::invalid_argument for more records than are live.
void gated_delta_net_materialize(const GatedDeltaNet& args, std::int64_t slot,
                                 std::int64_t num_records, float* out);
}  // namespace cpu

/// Both run the recurrence token by token and replay ring records by the operations that made them:
/// the bits of states and outputs do not depend on how a sequence is cut into chunks and rows, nor
/// on when its history is folded.
namespace cuda {
/// The recurrence over a row. A row starts from zeros if table[slot].kv_len is 0 (the slot's state
/// is not read), else from S0; the slot's ring must be empty. Writes S0 once, leaves the ring
/// alone. Enqueues on `stream`, does not synchronise. Throws std::invalid_argument for a dtype
/// other than float32, a key_dim above 256 or a bad shape, CudaError for a refused launch.
void gated_delta_net_prefill(const GatedDeltaNet& args, Stream stream);

/// The recurrence over S0, the live ring records and the row; appends the row's records after the
/// live ones. Folds the history into S0 where `flushes` says so: run exactly once between two
/// commits. Enqueues on `stream`, does not synchronise. Throws as the prefill does, and
/// std::invalid_argument for a ring that is not float32 or no power of two.
void gated_delta_net_verify(const GatedDeltaNet& args, Stream stream);
}  // namespace cuda
}  // namespace deltaflash
