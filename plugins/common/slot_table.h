#pragma once

#include <cstdint>

namespace deltaflash {

constexpr int kMaxEndIds = 8;
constexpr int kMaxLogitBiases = 256;
constexpr int kMaxTopLogprobs = 20;

/// Why a sequence ended. The device finds the first two, the host the others.
enum class FinishReason : std::int32_t {
  kNotFinished = 0,
  kEndId = 1,      // an end id was produced
  kLength = 2,     // max_tokens or the context limit
  kStopWords = 3,  // a stop string matched
  kCancelled = 4,
  kTimedOut = 5,
};

/// The one table of truth: what a kernel knows about the sequence in a slot. It lives in device
/// memory (in plain memory on the CPU backend); the host writes an entry at admission and
/// otherwise only reads results. Lengths are in tokens.
struct alignas(64) SlotState {
  std::int32_t last_token;     // newest emitted token; not yet in any cache
  std::int32_t kv_len;         // tokens committed to KV pages, conv ring and GDN state + ring
  std::int32_t rope_delta;     // rotary position of token n is n + rope_delta (n >= prompt length)
  std::int32_t ring_base;      // first live record of the replay ring
  std::int32_t ring_history;   // live records: committed, not yet folded into the state
  std::int32_t num_emitted;    // tokens emitted so far; index of the next one's random stream
  std::int32_t num_remaining;  // tokens that may still be emitted: max_tokens and context limit
  std::int32_t finish_reason;  // a FinishReason; a finished slot emits nothing more
  std::int32_t num_rounds;     // verify rounds done; index into a scripted drafter's plan
  std::int32_t num_forced;     // forced output tokens of this slot (test hook), 0 = none
  std::int32_t num_script;     // scripted accept lengths of this slot (test hook), 0 = none
  std::int32_t num_end_ids;    // <= kMaxEndIds
  std::int32_t end_ids[kMaxEndIds];
  // Sampling. temperature 0 = greedy; top_k 0, top_p 1 and min_p 0 = off.
  float temperature;
  float top_p;
  float min_p;
  std::int32_t top_k;
  std::uint64_t seed;
  // Rules for the logits, see sampling.h. An entry of zeros has none.
  float repetition_penalty;    // > 0; 0 and 1 = off
  float presence_penalty;      // 0 = off
  float frequency_penalty;     // 0 = off
  std::int32_t num_biases;     // <= kMaxLogitBiases
  std::int32_t min_tokens;     // tokens emitted before an end id has any probability
  std::int16_t forced_drafts;  // 1: forced tokens are what is drafted, not what is said (test hook)
  // What token_logprobs lists of each token: 0 nothing, 1 + k its logprob and k candidates.
  std::int16_t num_logprobs;  // <= 1 + kMaxTopLogprobs
};

/// The rows of one step, in device memory. Tokens are packed: row r owns the tokens
/// [row_start[r], row_start[r + 1]).
struct RowBatch {
  const std::int32_t* slots;      // [num_rows]; -1 marks a padded row: touch nothing
  const std::int32_t* row_start;  // [num_rows + 1]
  std::int64_t num_rows;
  std::int64_t num_tokens;      // packed width of the token buffers, >= row_start[num_rows]
  std::int64_t max_row_tokens;  // no row is longer
};

}  // namespace deltaflash
