#include <stdexcept>
#include <string>

#include "plugins/commit/commit.h"
#include "plugins/gated_delta_net/gated_delta_net.h"
#include "plugins/sampling/logit_rules.h"

namespace deltaflash::cpu {
namespace {

constexpr auto kNotFinished = static_cast<std::int32_t>(FinishReason::kNotFinished);

}  // namespace

void commit_round(const CommitRound& args, Stream /*stream*/) {
  const std::int64_t ring_rows = args.ring_rows;
  if (ring_rows <= 0 || (ring_rows & (ring_rows - 1)) != 0) {
    throw std::invalid_argument("commit_round: expected ring_rows to be a power of two, got " +
                                std::to_string(ring_rows));
  }
  for (std::int64_t row = 0; row < args.rows.num_rows; ++row) {
    const std::int64_t slot = args.rows.slots[row];
    if (slot < 0) {
      continue;
    }
    SlotState& state = args.table[slot];
    const std::int32_t row_len = args.rows.row_start[row + 1] - args.rows.row_start[row];
    const bool finished = state.finish_reason != kNotFinished;
    const std::int32_t emitted = finished ? 0 : args.num_emitted[row];
    if (args.prefill) {
      state.kv_len += row_len;
      state.ring_base = 0;
      state.ring_history = 0;
    } else {
      if (flushes(state.ring_history, row_len, args.history_limit)) {
        state.ring_base =
            static_cast<std::int32_t>((state.ring_base + state.ring_history) & (ring_rows - 1));
        state.ring_history = 0;
      }
      state.kv_len += emitted;
      state.ring_history += emitted;
    }
    if (finished) {
      continue;
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
}

}  // namespace deltaflash::cpu
