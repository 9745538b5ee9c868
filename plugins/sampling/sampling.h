#pragma once

#include <cstdint>

#include "plugins/common/slot_table.h"
#include "plugins/common/stream.h"

namespace deltaflash {

/// Samples the target's token at every position of a row and accepts drafts against it.
/// For row r with sample_start[r] >= 0, the logits rows sample_start[r] + i, i < row_len, are the
/// target's after the row's token i. Position i's token x_i is
///   forced[slot, num_emitted + i] while that index is < num_forced (test hook), else
///   the arg max (ties: lowest id) if temperature is 0, else a draw from
///   softmax(logits / temperature) kept to top_k, then top_p, then min_p, renormalised,
/// by inverse CDF in order of falling probability (ties: lowest id) with the uniform number of the
/// counter-based stream (seed, num_emitted + i): Philox4x32-10, Salmon et al., SC 2011. The row's
/// token i + 1 is a draft; it is accepted iff it equals x_i, which is lossless for a one-hot drafter and gives a seeded request
/// the same tokens with and without drafts, alone and in a batch.
/// Emits x_0 .. x_a, where a counts the leading drafts accepted, cut after the first end id and at
/// num_remaining. A finished slot or a negative sample_start emits nothing.
struct SampleAccept {
  const float* logits;  // [num_logits, vocab_size]
  std::int64_t vocab_size;
  const SlotState* table;
  RowBatch rows;
  const std::int32_t* sample_start;  // [num_rows]; -1: this row samples nothing
  const std::int32_t* sample_len;    // [num_rows]; positions sampled, 1 + drafts
  const std::int32_t* token_ids;     // [num_tokens]; drafts are a row's tokens from the second on
  const std::int32_t* forced;  // [num_slots, max_forced]; may be null
  std::int64_t max_forced;
  std::int64_t max_emitted;  // longest verify row
  bool greedy_only;          // every row's temperature is 0: a device may run a cheaper kernel
  std::int32_t* tokens;         // out [num_rows, max_emitted]; -1 past num_emitted
  std::int32_t* num_emitted;    // out [num_rows]
  std::int32_t* num_accepted;   // out [num_rows]: drafts accepted, before the cut
  std::int32_t* finish_reason;  // out [num_rows], a FinishReason
};

/// The uniform number in [0, 1) of stream `seed` at `index`; `lane` separates uses of one index.
float stream_uniform(std::uint64_t seed, std::uint64_t index, std::uint32_t lane);

namespace cpu {
void sample_accept(const SampleAccept& args, Stream stream);
}  // namespace cpu

namespace cuda {
/// Enqueues on `stream`, does not synchronise.
/// Probabilities are fixed-point numbers, exp(...) in steps of 2^-44 of the highest: their sums
/// have the same bits in any order.
/// Throws std::invalid_argument for a vocab_size outside [1, 2^19], CudaError for a refused launch.
void sample_accept(const SampleAccept& args, Stream stream);
}  // namespace cuda
}  // namespace deltaflash
