#pragma once

#include <cstdint>

#include "plugins/common/slot_table.h"
#include "plugins/common/stream.h"
#include "plugins/gated_delta_net/gated_delta_net.h"
#include "plugins/sampling/logit_rules.h"

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

/// What `commit_round` does for one row; a slot stands in one row at most.
constexpr void commit_row(const CommitRound& args, std::int64_t row) {
  const std::int64_t slot = args.rows.slots[row];
  if (slot < 0) {
    return;
  }
  SlotState& state = args.table[slot];
  const std::int32_t row_len = args.rows.row_start[row + 1] - args.rows.row_start[row];
  const bool finished =
      state.finish_reason != static_cast<std::int32_t>(FinishReason::kNotFinished);
  const std::int32_t emitted = finished ? 0 : args.num_emitted[row];
  if (args.prefill) {
    state.kv_len += row_len;
    state.ring_base = 0;
    state.ring_history = 0;
  } else {
    if (flushes(state.ring_history, row_len, args.history_limit)) {
      state.ring_base =
          static_cast<std::int32_t>((state.ring_base + state.ring_history) & (args.ring_rows - 1));
      state.ring_history = 0;
    }
    state.kv_len += emitted;
    state.ring_history += emitted;
  }
  if (finished) {
    return;
  }
  if (!args.prefill) {
    state.num_rounds += 1;
  }
  if (emitted > 0) {
    state.last_token = args.tokens[row * args.max_emitted + emitted - 1];
    state.num_emitted += emitted;
    state.num_remaining -= emitted;
  }
  if (args.token_counts != nullptr && has_penalties(state)) {
    std::uint16_t* counts = args.token_counts + slot * args.vocab_size;
    for (std::int64_t i = 0; i < emitted; ++i) {
      std::uint16_t& entry = counts[args.tokens[row * args.max_emitted + i]];
      entry = counted_once_more(entry);
    }
  }
  state.finish_reason = args.finish_reason[row];
}

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
