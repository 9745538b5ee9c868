#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "plugins/common/slot_table.h"
#include "runtime/src/image.h"

namespace deltaflash {

using RequestId = std::uint64_t;
using TokenId = std::int32_t;

/// How the next token is chosen. Names and order of the filters as in sampling.h.
struct SamplingConfig {
  float temperature = 0.0F;           // >= 0; 0 = greedy
  std::int32_t top_k = 0;             // >= 0; 0 = off
  float top_p = 1.0F;                 // (0, 1]; 1 = off
  float min_p = 0.0F;                 // [0, 1); 0 = off
  std::optional<std::uint64_t> seed;  // drawn at random if absent
  // Rules for the logits, before temperature and filters, and for greedy too: see sampling.h.
  float repetition_penalty = 1.0F;      // > 0; 1 = off; of tokens in prompt or output
  float presence_penalty = 0.0F;        // finite; of tokens in the output
  float frequency_penalty = 0.0F;       // finite; for each time a token is in the output
  std::map<TokenId, float> logit_bias;  // finite; at most kMaxLogitBiases, ids of the vocabulary
};

/// What comes back besides text and token ids.
struct OutputConfig {
  bool token_records = false;                // a TokenRecord of every emitted token
  std::optional<std::int32_t> top_logprobs;  // candidates of a record, 0 to kMaxTopLogprobs; absent
                                             // = no logprob and rank either
  bool return_context_logits = false;        // of every prompt token, on the final response
  bool return_generation_logits = false;     // of every emitted token, on the final response
  bool return_image_embeddings = false;      // what the pictures became, on the final response
};

/// One call. Names follow the TensorRT-LLM Executor API where it has the thing.
struct Request {
  std::vector<TokenId> input_token_ids;    // at least one, each in [0, vocab_size)
  std::optional<std::int32_t> max_tokens;  // >= 1; absent = ExecutorConfig::default_max_tokens
  std::int32_t min_tokens = 0;             // [0, max_tokens]; before, no end id and no stop string
  SamplingConfig sampling;
  OutputConfig output;
  std::optional<std::vector<TokenId>> end_ids;  // absent = the engine's; at most kMaxEndIds
  bool ignore_end_ids = false;
  std::vector<TokenId> stop_ids;  // end the text too, beside the end ids; kMaxEndIds together
  std::vector<std::string> stop_strings;
  std::vector<Image> images;        // in the order of their runs of placeholders in input_token_ids
  bool return_progress = false;     // responses say where the request is before its first token
  bool include_stop = false;        // keep the stop string or stop id in the text
  bool skip_special_tokens = true;  // leave special tokens out of the text
  std::optional<std::int64_t> allotted_time_ms;  // from enqueue, > 0; ends with kTimedOut
  std::string client_id;                         // for logs only
  // Test hooks, refused unless ExecutorConfig::max_scripted_tokens allows them.
  std::vector<TokenId> forced_tokens;      // what the target says, in place of its own choice
  std::vector<std::int32_t> draft_script;  // accept length of each round; drafts forced_tokens
  bool force_tokens = true;                // false: forced_tokens are drafted, but not said
  std::int32_t fail_after_tokens = 0;      // the loop fails when so many came out; 0 = never
};

/// Steady-clock times (ns) and counts of one request.
struct RequestStats {
  std::int64_t arrival_ns = 0;
  std::int64_t first_scheduled_ns = 0;  // 0 if it never left the queue
  std::int64_t vision_start_ns = 0;     // 0 without pictures; with a cache hit too
  std::int64_t vision_end_ns = 0;
  std::int64_t prefill_start_ns = 0;
  std::int64_t first_token_ns = 0;
  std::int64_t last_token_ns = 0;
  std::int64_t num_prefill_chunks = 0;
  std::int64_t num_steps = 0;     // verify rounds that emitted something
  std::int64_t num_drafted = 0;   // draft tokens verified
  std::int64_t num_accepted = 0;  // of these, accepted and emitted
};

/// One of the likeliest tokens at a position.
struct TokenCandidate {
  TokenId id;
  std::string piece;  // the token's bytes
  float logprob;      // as token_logprobs.h
};

/// One emitted token.
struct TokenRecord {
  TokenId id;
  std::string piece;                       // the token's bytes; empty for a hidden special token
  std::optional<float> logprob;            // as token_logprobs.h; of requests with top_logprobs
  std::optional<std::int32_t> rank;        // with logprob
  std::vector<TokenCandidate> candidates;  // likeliest first
};

/// Rows of fp32 logits, or of embeddings.
struct LogitRows {
  std::int64_t num_rows = 0;
  std::vector<float> values;  // [num_rows, vocab_size], or hidden_size
};

/// Where a request is.
enum class ProgressPhase : std::uint8_t { kQueued, kEncoding, kPrefill, kDecoding };

struct Progress {
  ProgressPhase phase = ProgressPhase::kQueued;
  std::optional<double> fraction;  // of the phase, 0 to 1; kEncoding and kPrefill have one
};

/// What became of a request since its last response. Exactly one final response comes for each
/// id that enqueue_request returned.
struct Response {
  RequestId request_id = 0;
  std::string text;                // delta, valid UTF-8
  std::vector<TokenId> token_ids;  // delta: ids emitted
  // Delta: of the tokens whose text has been released, if asked for. One record for each token id,
  // in order, but those whose text is held back come with it, or with the final response.
  std::vector<TokenRecord> records;
  bool is_final = false;
  FinishReason finish_reason = FinishReason::kNotFinished;
  std::optional<std::string> stop_string;  // which one matched (kStopWords)
  std::optional<TokenId> end_id;           // which end id or stop id came (kEndId)
  std::int64_t num_prompt_tokens = 0;
  std::int64_t num_completion_tokens = 0;  // so far
  std::optional<std::string> error;        // the engine was lost; the request may be retried
  RequestStats stats;
  LogitRows context_logits;
  LogitRows generation_logits;
  LogitRows image_embeddings;
  std::optional<Progress> progress;  // if asked for, when it changed
};

struct ExecutorConfig {
  std::string device = "cpu";  // "cpu" or "cuda"
  std::string provider;        // of segments: "cpu"; "cublaslt", "exact" on cuda; "" = the first
  std::int32_t max_batch_size = 8;       // slots
  std::int32_t max_num_tokens = 512;     // token budget of one step: decode rows + prefill chunks
  std::int32_t max_prefill_chunk = 256;  // longest piece of one prompt in a step
  std::int32_t max_queue_size = 256;     // requests that may wait
  std::int64_t max_queued_tokens = 1 << 20;  // prompt tokens that may wait
  std::int32_t kv_page_size = 32;            // tokens
  std::int64_t max_kv_tokens = 0;            // pool size; 0 = max_batch_size * min(context, 4096)
  std::int32_t default_max_tokens = 1024;
  std::int32_t max_draft_tokens = 0;      // longest draft; a verify row has one token more
  std::int32_t max_rounds_in_flight = 1;  // rounds launched but not read, 1 or 2
  std::int32_t num_threads = 0;           // CPU backend; 0 = all cores
  std::int32_t iter_stats_max_iterations = 1000;
  std::int32_t max_scripted_tokens = 0;     // > 0 turns the test hooks on
  std::int32_t ring_history = 0;            // L of the flush rule; 0 = absorb at start
  std::int32_t max_admission_passes = 16;   // requests that may pass one that does not fit
  std::int64_t max_image_pixels = 4 << 20;  // of one picture; the engine's limit holds as well
  std::int64_t encoder_cache_bytes = 0;     // for encoded pictures with a digest; 0 = off
  std::int32_t max_vision_tile = 384;  // patches that go through a stage of the encoder together
};

/// One iteration of the loop.
struct IterationStats {
  std::int64_t iteration = 0;
  std::int64_t timestamp_ns = 0;  // steady clock, at its end
  std::int64_t latency_ns = 0;
  std::int64_t num_active = 0;
  std::int64_t num_queued = 0;
  std::int64_t num_context_tokens = 0;
  std::int64_t num_generation_rows = 0;
  std::int64_t num_emitted_tokens = 0;
  std::int64_t num_drafted = 0;
  std::int64_t num_accepted = 0;
  std::int64_t num_completed = 0;
  std::int64_t pages_used = 0;
  std::int64_t slots_used = 0;
  std::int64_t vision_ns = 0;  // of latency_ns, spent on pictures
};

struct LoadReport {
  std::int64_t num_running = 0;
  std::int64_t num_queued = 0;
  std::int64_t num_queued_tokens = 0;
  std::int64_t slots_used = 0;
  std::int64_t slots_total = 0;
  std::int64_t pages_used = 0;
  std::int64_t pages_total = 0;
  std::int64_t page_size = 0;
  std::int64_t silence_ns = 0;            // since the loop last finished an iteration; 0 when idle
  std::int64_t oldest_queued_ns = 0;      // age of the oldest waiting request; 0 when none waits
  std::int64_t encoder_cache_bytes = 0;   // held
  std::int64_t encoder_cache_hits = 0;    // pictures since the start
  std::int64_t encoder_cache_misses = 0;  // of those with a digest, while the cache is on
};

}  // namespace deltaflash
