#pragma once

#include <cstdint>
#include <vector>

namespace deltaflash {

/// Which repetition ends an answer: a run of tokens in which every token equals the one a period
/// before, long enough to hold the period `min_repeats` times and to have `min_repeated_tokens`.
struct RepetitionLimits {
  std::int32_t max_period = 64;            // tokens, 1 to 512: the longest n-gram looked for
  std::int32_t min_repeats = 8;            // 2 to 1024
  std::int32_t min_repeated_tokens = 256;  // 0 to 65536; the last repeat counts as far as it goes
};

/// Finds the token with which a sequence has repeated itself too often. Sees one token at a time,
/// so where a step or a block of drafts ends makes no difference. Time per token and memory are
/// proportional to `max_period`, whatever the length of the sequence.
///
/// Not for use by two threads at a time.
class RepetitionGuard {
 public:
  /// The first `min_tokens` tokens never end the sequence, though they may be repeated by later
  /// ones. Throws std::invalid_argument, naming the field, for limits out of range.
  RepetitionGuard(const RepetitionLimits& limits, std::int64_t min_tokens);

  /// Adds one token, at least 0. Returns true if the newest tokens are a repetition by the limits.
  bool push(std::int32_t token_id);

 private:
  std::int64_t min_tokens_;
  std::int64_t num_tokens_ = 0;
  // The newest max_period tokens, -1 before the first; each is written twice, max_period apart, so
  // that those before the next token lie in one piece from oldest_ on.
  std::vector<std::int32_t> recent_;
  std::size_t oldest_ = 0;
  // Entry i is for the period max_period - i.
  std::vector<std::int32_t> num_equal_;  // newest tokens that equal the one a period before
  std::vector<std::int32_t> limit_;      // of num_equal_, from which on it is a repetition
};

}  // namespace deltaflash
