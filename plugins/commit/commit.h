#pragma once

#include <cstdint>

#include "plugins/common/slot_table.h"
#include "plugins/common/stream.h"

namespace deltaflash {

/// Moves the cursors of every row's slot, once per step for the whole model.
/// Prefill row: kv_len += row_len, the ring is emptied. Verify row: the flush that the layers did is
/// mirrored (ring_base, ring_history), then kv_len and ring_history grow by the tokens committed:
/// num_emitted[r], or 0 for a finished slot. Both: last_token, num_emitted, num_remaining,
/// finish_reason and num_rounds follow what was emitted.
struct CommitRound {
  SlotState* table;
  RowBatch rows;
  const std::int32_t* tokens;         // [num_rows, max_emitted]
  std::int64_t max_emitted;           // longest verify row
  const std::int32_t* num_emitted;    // [num_rows]
  const std::int32_t* finish_reason;  // [num_rows]
  std::int64_t ring_rows;
  std::int64_t history_limit;
  bool prefill;
};

namespace cpu {
void commit_round(const CommitRound& args, Stream stream);
}  // namespace cpu

namespace cuda {
/// Enqueues on `stream`, does not synchronise.
/// Throws std::invalid_argument for ring_rows that are no power of two, CudaError for a refused
/// launch.
void commit_round(const CommitRound& args, Stream stream);
}  // namespace cuda
}  // namespace deltaflash
