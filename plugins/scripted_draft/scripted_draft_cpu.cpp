#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "plugins/scripted_draft/scripted_draft.h"

namespace deltaflash::cpu {

void scripted_draft(const ScriptedDraft& args, Stream /*stream*/) {
  if (args.vocab_size <= 0) {
    throw std::invalid_argument("scripted_draft: expected vocab_size > 0, got " +
                                std::to_string(args.vocab_size));
  }
  for (std::int64_t row = 0; row < args.rows.num_rows; ++row) {
    const std::int64_t slot = args.rows.slots[row];
    if (slot < 0) {
      continue;
    }
    const SlotState& state = args.table[slot];
    const std::int64_t num_script = std::min<std::int64_t>(state.num_script, args.max_forced);
    if (num_script <= 0) {
      continue;
    }
    const std::int64_t num_forced = std::min<std::int64_t>(state.num_forced, args.max_forced);
    const std::int32_t* forced = args.forced + slot * args.max_forced;
    const std::int32_t* script = args.script + slot * args.max_forced;
    const std::int64_t first = args.rows.row_start[row] + std::int64_t{1};
    const std::int64_t num_drafts = args.rows.row_start[row + 1] - first;
    const std::int64_t right = script[state.num_rounds % num_script];
    for (std::int64_t i = 0; i < num_drafts; ++i) {
      const std::int64_t index = state.num_emitted + i;
      const std::int64_t id = index < num_forced ? forced[index] : 0;
      args.token_ids[first + i] =
          static_cast<std::int32_t>(i < right ? id : (id + 1) % args.vocab_size);
    }
  }
}

}  // namespace deltaflash::cpu
