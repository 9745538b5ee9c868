#pragma once

#include <cstdint>

#include "plugins/common/slot_table.h"
#include "plugins/common/stream.h"

namespace deltaflash {

/// Samples the target's token at every position of a row and accepts drafts against it.
/// For row r with sample_start[r] >= 0, the logits rows sample_start[r] + i, i < sample_len[r], are
/// the target's after the row's token i. Position i's token x_i is
///   forced[slot, num_emitted + i] while that index is < num_forced (test hook; not with
///     forced_drafts), else
///   the arg max (ties: lowest id) of l if temperature is 0, else a draw from
///   softmax(l / temperature) kept to top_k, then top_p, then min_p, renormalised,
/// by inverse CDF in order of falling probability (ties: lowest id) with the uniform number of the
/// counter-based stream (seed, num_emitted + i, lane 0). Each filter sees what the one before it
/// kept, renormalised: top_p keeps the shortest prefix of that order that reaches it, min_p what
/// has at least min_p times the highest probability. NaN logits have no probability; a row without
/// a logit above -inf gives id 0. Probabilities are computed in double. The row's token
/// i + 1 is a draft; it is accepted iff it equals x_i, which is lossless for a one-hot drafter and
/// gives a seeded request the same tokens with and without drafts, alone and in a batch. Emits x_0
/// .. x_a, where a counts the leading drafts accepted, cut after the first end id and at
/// num_remaining; an end id at the last position allowed is kEndId, not kLength. A finished slot or
/// a negative sample_start emits nothing.
/// l are the logits under the slot's rules: `ruled_logit` (logit_rules.h) of each token with its
/// bias and its count, which is that of the table plus that of the row's drafts before position i,
/// for these were accepted if position i matters at all; then -inf for the end ids while
/// num_emitted + i < min_tokens. `logits` itself is left as it is.
struct SampleAccept {
  const float* logits;  // [num_logits, vocab_size]
  std::int64_t vocab_size;
  const SlotState* table;
  RowBatch rows;
  const std::int32_t* sample_start;  // [num_rows]; -1: this row samples nothing
  const std::int32_t* sample_len;    // [num_rows]; positions sampled, 1 + drafts
  const std::int32_t* token_ids;     // [num_tokens]; a row's drafts follow its first token
  const std::int32_t* forced;        // [num_slots, max_forced]; may be null
  std::int64_t max_forced;
  const std::uint16_t* token_counts;  // [num_slots, vocab_size]; null: no slot has penalties
  const std::int32_t* bias_ids;       // [num_slots, kMaxLogitBiases], a slot's num_biases rising
  const float* bias_values;           // as bias_ids; both null: no slot has biases
  std::int64_t max_emitted;           // longest verify row
  bool greedy_only;           // every temperature is 0, no slot has rules: a cheaper kernel will do
  std::int32_t* tokens;       // out [num_rows, max_emitted]; -1 past num_emitted
  std::int32_t* num_emitted;  // out [num_rows]
  std::int32_t* num_accepted;   // out [num_rows]: drafts accepted, before the cut
  std::int32_t* finish_reason;  // out [num_rows]: the slot's FinishReason after this round
};

/// The uniform number in [0, 1) of stream `seed` at `index`; `lane` separates uses of one index.
/// The upper 24 bits of the first word of Philox4x32-10 (philox.h), key = seed, counter = (index,
/// lane, 0), low words first.
float stream_uniform(std::uint64_t seed, std::uint64_t index, std::uint32_t lane);

namespace cpu {
/// Throws std::invalid_argument for a vocab_size <= 0 or a row that samples more than max_emitted
/// positions.
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
