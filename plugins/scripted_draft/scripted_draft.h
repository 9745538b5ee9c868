#pragma once

#include <cstdint>

#include "plugins/common/slot_table.h"
#include "plugins/common/stream.h"

namespace deltaflash {

/// A drafter for tests: drafts the forced output of the slot, right for as many tokens as its
/// script says for this round and wrong (id + 1 mod vocab_size) at the next.
///   right = script[s, num_rounds % num_script]
///   draft_ids[s, i] = forced[s, num_emitted + i] for i < right (0 past num_forced), then wrong ids
/// All max_draft ids are written; `rows.row_start` is not read. Slots without a script (num_script
/// 0) draft nothing; their draft_ids stay as they are.
struct ScriptedDraft {
  const SlotState* table;
  const std::int32_t* forced;  // [num_slots, max_forced]
  const std::int32_t* script;  // [num_slots, max_forced], accept lengths
  std::int64_t max_forced;
  RowBatch rows;
  std::int32_t* draft_ids;  // [num_slots, max_draft]
  std::int64_t max_draft;
  std::int32_t vocab_size;
};

namespace cpu {
/// Throws std::invalid_argument for a vocab_size <= 0.
void scripted_draft(const ScriptedDraft& args, Stream stream);
}  // namespace cpu
}  // namespace deltaflash
