#pragma once

#include <cstdint>

#include "plugins/common/slot_table.h"
#include "plugins/common/stream.h"

namespace deltaflash {

/// A drafter for tests: drafts the forced output of the slot, right for as many tokens as its
/// script says for this round and wrong (id + 1 mod vocab_size) at the next. Token 1 + i of a row
/// becomes
///   right = script[s, num_rounds % num_script]
///   forced[s, num_emitted + i] for i < right (0 past num_forced), else the wrong id
/// Rows of one token and slots without a script (num_script 0) are left alone.
struct ScriptedDraft {
  const SlotState* table;
  const std::int32_t* forced;  // [num_slots, max_forced]
  const std::int32_t* script;  // [num_slots, max_forced], accept lengths
  std::int64_t max_forced;
  RowBatch rows;
  std::int32_t* token_ids;  // [num_tokens]; written behind the first token of each row
  std::int32_t vocab_size;
};

namespace cpu {
/// Throws std::invalid_argument for a vocab_size <= 0.
void scripted_draft(const ScriptedDraft& args, Stream stream);
}  // namespace cpu

namespace cuda {
/// Enqueues on `stream`, does not synchronise.
/// Throws std::invalid_argument for a vocab_size <= 0, CudaError for a refused launch.
void scripted_draft(const ScriptedDraft& args, Stream stream);
}  // namespace cuda
}  // namespace deltaflash
