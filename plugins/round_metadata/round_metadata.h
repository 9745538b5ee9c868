#pragma once

#include <cstdint>

#include "plugins/common/slot_table.h"
#include "plugins/common/stream.h"

namespace deltaflash {

/// All that a round derives from the slot table before it drafts and verifies, in one launch. The
/// host says only which slots run and how many tokens each verifies; row r of slot s gets
///   row_start[r + 1] = row_start[r] + row_len[r]
///   token_ids[row_start[r]] = last_token   (the drafter fills the row's other tokens)
///   positions = kv_len + i + rope_delta on all three axes
///   sample_start[r] = row_start[r], sample_len[r] = row_len[r]   (-1 and 0 for a padded row)
/// Tokens past the last row pad the step to its bucket: id 0 at position 0, owned by no row.
struct RoundMetadata {
  const SlotState* table;
  const std::int32_t* row_slots;  // [num_rows], -1 marks a padded row; written by the host
  const std::int32_t* row_len;    // [num_rows], 0 for padded rows; written by the host
  std::int64_t num_rows;
  std::int64_t num_tokens;     // of the bucket, >= the sum of row_len
  std::int32_t* slots;         // out [num_rows], a copy of row_slots in device memory
  std::int32_t* row_start;     // out [num_rows + 1]
  std::int32_t* token_ids;     // out [num_tokens]
  std::int32_t* positions;     // out [3, num_tokens]
  std::int32_t* sample_start;  // out [num_rows]
  std::int32_t* sample_len;    // out [num_rows]
};

namespace cpu {
/// Throws std::invalid_argument if the rows have more than num_tokens tokens.
void round_metadata(const RoundMetadata& args, Stream stream);
}  // namespace cpu

namespace cuda {
/// Enqueues on `stream`, does not synchronise.
/// Throws CudaError for a refused launch.
void round_metadata(const RoundMetadata& args, Stream stream);
}  // namespace cuda
}  // namespace deltaflash
