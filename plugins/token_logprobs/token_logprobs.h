#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "plugins/common/slot_table.h"
#include "plugins/common/stream.h"

namespace deltaflash {

/// How likely the model found each token that a row emits, and what it found likelier, by its
/// logits as they are: before temperature, penalties, biases and filters.
/// For row r whose slot asks for it (SlotState::num_logprobs > 0) and i < num_emitted[r], with
/// l = logits[sample_start[r] + i] and t = tokens[r, i]:
///   logprob[r, i]         = l[t] - log(sum of exp(l[v]) over v), natural logarithm
///   rank[r, i]            = 1 + how many v have l[v] > l[t]; equal logits share a rank
///   top_ids[r, i, j]      = the v in j-th place of falling l, ties to the lowest id,
///   top_logprobs[r, i, j] = its logprob, for j < k = min(num_logprobs - 1, vocab_size)
/// Nothing else is written: no other row, no other position, no place from k on. A forced token is
/// judged like any other.
/// NaN counts as -inf. A token of -inf has the logprob -inf, and so has every token where no logit
/// lies above -inf. Where the largest is +inf, those that are share the probability equally. Any
/// finite logit has a finite logprob: what would be below the lowest float is the lowest float.
/// The largest logit is subtracted before exp; the sum adds few terms in fp32, those in double. The
/// result is within 2e-6 + 2^-23 * |logprob| of the exact one, at most 0, and has the same bits
/// whatever the batch and the number of threads.
struct TokenLogprobs {
  const float* logits;  // [num_logits, vocab_size]
  std::int64_t vocab_size;
  const SlotState* table;
  RowBatch rows;
  const std::int32_t* sample_start;  // [num_rows]; of rows that emit: >= 0
  const std::int32_t* tokens;        // [num_rows, max_emitted], as sample_accept writes them
  const std::int32_t* num_emitted;   // [num_rows]
  std::int64_t max_emitted;          // longest verify row
  float* logprob;                    // out [num_rows, max_emitted]
  std::int32_t* rank;                // out [num_rows, max_emitted]
  std::int32_t* top_ids;             // out [num_rows, max_emitted, kMaxTopLogprobs]
  float* top_logprobs;               // out [num_rows, max_emitted, kMaxTopLogprobs]
};

/// Candidates to list, or -1: the row's position i has no record.
constexpr std::int64_t num_candidates(const TokenLogprobs& args, std::int64_t row, std::int64_t i) {
  const std::int64_t slot = args.rows.slots[row];
  if (slot < 0 || i >= args.num_emitted[row] || args.table[slot].num_logprobs <= 0) {
    return -1;
  }
  const std::int64_t wanted = args.table[slot].num_logprobs - 1;
  return std::min({wanted, std::int64_t{kMaxTopLogprobs}, args.vocab_size});
}

/// The logprob of a logit. `high` is the largest logit and `log_sum` the logarithm of the sum of
/// exp(l - high), or of the number of +inf where `high` is +inf.
constexpr float logprob_of(float logit, float high, double log_sum) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr double kLowest = std::numeric_limits<float>::lowest();
  if (!(logit > -kInfinity) || (high == kInfinity && logit < kInfinity)) {
    return -kInfinity;
  }
  const double distance = high == kInfinity ? 0.0 : static_cast<double>(high) - logit;
  return static_cast<float>(std::clamp(0.0 - distance - log_sum, kLowest, 0.0));
}

namespace cpu {
/// Throws std::invalid_argument for a vocab_size <= 0.
void token_logprobs(const TokenLogprobs& args, Stream stream);
}  // namespace cpu

namespace cuda {
/// Enqueues on `stream`, does not synchronise. One CTA for each row and position.
/// Throws std::invalid_argument for a vocab_size outside [1, 2^30], CudaError for a refused launch.
void token_logprobs(const TokenLogprobs& args, Stream stream);
}  // namespace cuda
}  // namespace deltaflash
