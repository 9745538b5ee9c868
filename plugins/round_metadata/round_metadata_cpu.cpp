#include <stdexcept>
#include <string>

#include "plugins/round_metadata/round_metadata.h"

namespace deltaflash::cpu {

void round_metadata(const RoundMetadata& args, Stream /*stream*/) {
  const RowBatch& rows = args.rows;
  for (std::int64_t row = 0; row < rows.num_rows; ++row) {
    const std::int64_t row_len = rows.row_start[row + 1] - rows.row_start[row];
    if (rows.slots[row] >= 0 && row_len > args.max_draft + 1) {
      throw std::invalid_argument("round_metadata: expected rows of at most " +
                                  std::to_string(args.max_draft + 1) + " tokens, got " +
                                  std::to_string(row_len) + " in row " + std::to_string(row));
    }
  }
  for (std::int64_t row = 0; row < rows.num_rows; ++row) {
    const std::int64_t slot = rows.slots[row];
    if (slot < 0) {
      continue;
    }
    const SlotState& state = args.table[slot];
    const std::int32_t* draft = args.draft_ids + slot * args.max_draft;
    const std::int64_t first = rows.row_start[row];
    const std::int64_t row_len = rows.row_start[row + 1] - first;
    for (std::int64_t i = 0; i < row_len; ++i) {
      args.token_ids[first + i] = i == 0 ? state.last_token : draft[i - 1];
      const std::int32_t position = state.kv_len + static_cast<std::int32_t>(i) + state.rope_delta;
      for (std::int64_t axis = 0; axis < 3; ++axis) {
        args.positions[axis * rows.num_tokens + first + i] = position;
      }
    }
  }
}

}  // namespace deltaflash::cpu
