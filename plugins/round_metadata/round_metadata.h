#pragma once

#include <cstdint>

#include "plugins/common/slot_table.h"
#include "plugins/common/stream.h"

namespace deltaflash {

/// All that a verify step derives from the slot table, in one launch: row r of slot s with
/// row_len = row_start[r + 1] - row_start[r] tokens gets
///   token_ids = last_token, draft_ids[s, 0 .. row_len - 2]
///   positions = kv_len + i + rope_delta on all three axes
/// Nothing is written for a padded row.
struct RoundMetadata {
  const SlotState* table;
  const std::int32_t* draft_ids;  // [num_slots, max_draft]
  std::int64_t max_draft;
  RowBatch rows;
  std::int32_t* token_ids;  // [num_tokens]
  std::int32_t* positions;  // [3, num_tokens]
};

namespace cpu {
/// Throws std::invalid_argument for a row of more than max_draft + 1 tokens.
void round_metadata(const RoundMetadata& args, Stream stream);
}  // namespace cpu
}  // namespace deltaflash
