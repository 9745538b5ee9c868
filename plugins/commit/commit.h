#pragma once

#include <cstdint>

#include "plugins/common/slot_table.h"
#include "plugins/common/stream.h"

namespace deltaflash {

/// Moves the cursors of every row's slot, once per step for the whole model.
/// Prefill row: kv_len += row_len, the ring is emptied. Verify row: the flush that the layers did
/// is mirrored (ring_base, ring_history), then kv_len and ring_history grow by the tokens
/// committed: num_emitted[r], or 0 for a slot that was finished before. Both, unless it was
/// finished before: last_token, num_emitted, num_remaining and finish_reason follow what was
/// emitted, as do the token counts (logit_rules.h) of a slot with penalties; a verify row also
/// counts into num_rounds.
struct CommitRound {
  SlotState* table;
  RowBatch rows;
  const std::int32_t* tokens;         // [num_rows, max_emitted]
  std::int64_t max_emitted;           // longest verify row
  const std::int32_t* num_emitted;    // [num_rows]
  const std::int32_t* finish_reason;  // [num_rows]
  std::uint16_t* token_counts;        // [num_slots, vocab_size]; null: no slot has penalties
  std::int64_t vocab_size;            // of token_counts
  std::int64_t ring_rows;
  std::int64_t history_limit;
  bool prefill;
};

namespace cpu {
/// Throws std::invalid_argument for a ring_rows that is no power of two.
void commit_round(const CommitRound& args, Stream stream);
}  // namespace cpu

namespace cuda {
/// Enqueues on `stream`, does not synchronise.
/// Throws std::invalid_argument for ring_rows that are no power of two, CudaError for a refused
/// launch.
void commit_round(const CommitRound& args, Stream stream);
}  // namespace cuda
}  // namespace deltaflash
