#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "plugins/round_metadata/round_metadata.h"

namespace deltaflash::cpu {

void round_metadata(const RoundMetadata& args, Stream /*stream*/) {
  std::int64_t used = 0;
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    used += args.row_len[row];
  }
  if (used > args.num_tokens) {
    throw std::invalid_argument("round_metadata: expected rows of at most " +
                                std::to_string(args.num_tokens) + " tokens together, got " +
                                std::to_string(used));
  }
  std::fill_n(args.token_ids, args.num_tokens, 0);
  std::fill_n(args.positions, 3 * args.num_tokens, 0);
  std::int32_t start = 0;
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    const std::int32_t slot = args.row_slots[row];
    const std::int32_t row_len = args.row_len[row];
    args.slots[row] = slot;
    args.row_start[row] = start;
    args.sample_start[row] = slot < 0 ? -1 : start;
    args.sample_len[row] = slot < 0 ? 0 : row_len;
    if (slot >= 0 && row_len > 0) {
      const SlotState& state = args.table[slot];
      args.token_ids[start] = state.last_token;
      for (std::int32_t i = 0; i < row_len; ++i) {
        const std::int32_t position = state.kv_len + i + state.rope_delta;
        for (std::int64_t axis = 0; axis < 3; ++axis) {
          args.positions[axis * args.num_tokens + start + i] = position;
        }
      }
    }
    start += row_len;
  }
  args.row_start[args.num_rows] = start;
}

}  // namespace deltaflash::cpu
