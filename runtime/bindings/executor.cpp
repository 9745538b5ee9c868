#include "runtime/src/executor.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cmath>
#include <utility>

#include "runtime/bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace deltaflash {
namespace {

using LogitArray = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig>;

/// The rows as an array that owns them, or None where none were asked for.
nb::object logit_array(LogitRows& rows) {
  if (rows.num_rows == 0) {
    return nb::none();
  }
  auto* values = new std::vector<float>(std::move(rows.values));
  const nb::capsule owner(
      values, [](void* data) noexcept { delete static_cast<std::vector<float>*>(data); });
  const auto num_rows = static_cast<std::size_t>(std::exchange(rows.num_rows, 0));
  return nb::cast(LogitArray(values->data(), {num_rows, values->size() / num_rows}, owner));
}

nb::bytes bytes_of(const std::string& text) { return nb::bytes(text.data(), text.size()); }

std::optional<std::chrono::nanoseconds> timeout_of(std::optional<double> timeout_s) {
  // A year stands for ever, so that no finite number overflows.
  constexpr double kLongest = 365.0 * 86400.0;
  if (!timeout_s || *timeout_s > kLongest) {
    return std::nullopt;
  }
  if (std::isnan(*timeout_s)) {
    throw std::invalid_argument("timeout_s: not a number, expected seconds or None");
  }
  return std::chrono::nanoseconds(static_cast<std::int64_t>(std::max(0.0, *timeout_s) * 1e9));
}

void bind_configs(nb::module_& module) {
  nb::enum_<FinishReason>(module, "FinishReason", "Why a request ended.")
      .value("NOT_FINISHED", FinishReason::kNotFinished)
      .value("END_ID", FinishReason::kEndId)
      .value("LENGTH", FinishReason::kLength)
      .value("STOP_WORDS", FinishReason::kStopWords)
      .value("CANCELLED", FinishReason::kCancelled)
      .value("TIMED_OUT", FinishReason::kTimedOut)
      .value("REPETITION", FinishReason::kRepetition);

  nb::class_<RepetitionLimits>(module, "RepetitionLimits", "Which repetition ends an answer.")
      .def(
          "__init__",
          [](RepetitionLimits* self, std::int32_t max_period, std::int32_t min_repeats,
             std::int32_t min_repeated_tokens) {
            new (self) RepetitionLimits{max_period, min_repeats, min_repeated_tokens};
          },
          nb::kw_only(), "max_period"_a = 64, "min_repeats"_a = 8, "min_repeated_tokens"_a = 256,
          "max_period: 1 to 512, the longest n-gram looked for, tokens. min_repeats: 2 to 1024,\n"
          "how often it has to come in a row. min_repeated_tokens: 0 to 65536, how many tokens\n"
          "all of them have to be.")
      .def_rw("max_period", &RepetitionLimits::max_period)
      .def_rw("min_repeats", &RepetitionLimits::min_repeats)
      .def_rw("min_repeated_tokens", &RepetitionLimits::min_repeated_tokens);

  nb::class_<SamplingConfig>(module, "SamplingConfig", "How the next token is chosen.")
      .def(
          "__init__",
          [](SamplingConfig* self, float temperature, std::int32_t top_k, float top_p, float min_p,
             std::optional<std::uint64_t> seed, float repetition_penalty, float presence_penalty,
             float frequency_penalty, std::map<TokenId, float> logit_bias) {
            new (self) SamplingConfig{temperature,
                                      top_k,
                                      top_p,
                                      min_p,
                                      seed,
                                      repetition_penalty,
                                      presence_penalty,
                                      frequency_penalty,
                                      std::move(logit_bias)};
          },
          nb::kw_only(), "temperature"_a = 0.0F, "top_k"_a = 0, "top_p"_a = 1.0F, "min_p"_a = 0.0F,
          "seed"_a = nb::none(), "repetition_penalty"_a = 1.0F, "presence_penalty"_a = 0.0F,
          "frequency_penalty"_a = 0.0F, "logit_bias"_a = std::map<TokenId, float>{},
          "temperature >= 0 (0 = greedy); top_k >= 0 (0 = off); top_p in (0, 1]; min_p in [0, 1);\n"
          "seed: 64 bits, drawn at random if None. Before these, and for greedy too:\n"
          "repetition_penalty > 0 (1 = off) of tokens in prompt or output; presence_penalty and\n"
          "frequency_penalty of tokens in the output, 0 = off; logit_bias: id to what is added, "
          "at\n"
          "most MAX_LOGIT_BIASES.")
      .def_rw("temperature", &SamplingConfig::temperature)
      .def_rw("top_k", &SamplingConfig::top_k)
      .def_rw("top_p", &SamplingConfig::top_p)
      .def_rw("min_p", &SamplingConfig::min_p)
      .def_rw("seed", &SamplingConfig::seed)
      .def_rw("repetition_penalty", &SamplingConfig::repetition_penalty)
      .def_rw("presence_penalty", &SamplingConfig::presence_penalty)
      .def_rw("frequency_penalty", &SamplingConfig::frequency_penalty)
      .def_rw("logit_bias", &SamplingConfig::logit_bias);

  nb::class_<OutputConfig>(module, "OutputConfig", "What comes back besides text and token ids.")
      .def(
          "__init__",
          [](OutputConfig* self, bool token_records, std::optional<std::int32_t> top_logprobs,
             bool context_logits, bool generation_logits, bool image_embeddings) {
            new (self) OutputConfig{token_records, top_logprobs, context_logits, generation_logits,
                                    image_embeddings};
          },
          nb::kw_only(), "token_records"_a = false, "top_logprobs"_a = nb::none(),
          "return_context_logits"_a = false, "return_generation_logits"_a = false,
          "return_image_embeddings"_a = false,
          "token_records: responses carry a TokenRecord of every token. top_logprobs: candidates\n"
          "of a record, 0 to MAX_TOP_LOGPROBS; None: no logprob and rank either. Logits and what\n"
          "became of pictures come with the final response.")
      .def_rw("token_records", &OutputConfig::token_records)
      .def_rw("top_logprobs", &OutputConfig::top_logprobs)
      .def_rw("return_context_logits", &OutputConfig::return_context_logits)
      .def_rw("return_generation_logits", &OutputConfig::return_generation_logits)
      .def_rw("return_image_embeddings", &OutputConfig::return_image_embeddings);

  nb::class_<ExecutorConfig>(module, "ExecutorConfig", "Sizes and limits of an executor.")
      .def(
          "__init__",
          [](ExecutorConfig* self, std::string device, std::string provider,
             std::int32_t max_batch_size, std::int32_t max_num_tokens,
             std::int32_t max_prefill_chunk, std::int32_t max_queue_size,
             std::int64_t max_queued_tokens, std::int32_t kv_page_size, std::int64_t max_kv_tokens,
             std::int32_t default_max_tokens, std::int32_t max_draft_tokens,
             std::int32_t max_rounds_in_flight, std::int32_t num_threads,
             std::int32_t iter_stats_max_iterations, std::int32_t max_scripted_tokens,
             std::int32_t ring_history, std::int32_t max_admission_passes,
             std::int64_t max_image_pixels, std::int64_t encoder_cache_bytes,
             std::int32_t max_vision_tile) {
            new (self) ExecutorConfig{std::move(device),    std::move(provider),
                                      max_batch_size,       max_num_tokens,
                                      max_prefill_chunk,    max_queue_size,
                                      max_queued_tokens,    kv_page_size,
                                      max_kv_tokens,        default_max_tokens,
                                      max_draft_tokens,     max_rounds_in_flight,
                                      num_threads,          iter_stats_max_iterations,
                                      max_scripted_tokens,  ring_history,
                                      max_admission_passes, max_image_pixels,
                                      encoder_cache_bytes,  max_vision_tile};
          },
          nb::kw_only(), "device"_a = "cpu", "provider"_a = "", "max_batch_size"_a = 8,
          "max_num_tokens"_a = 512, "max_prefill_chunk"_a = 256, "max_queue_size"_a = 256,
          "max_queued_tokens"_a = 1 << 20, "kv_page_size"_a = 32, "max_kv_tokens"_a = 0,
          "default_max_tokens"_a = 1024, "max_draft_tokens"_a = 0, "max_rounds_in_flight"_a = 1,
          "num_threads"_a = 0, "iter_stats_max_iterations"_a = 1000, "max_scripted_tokens"_a = 0,
          "ring_history"_a = 0, "max_admission_passes"_a = 16, "max_image_pixels"_a = 4 << 20,
          "encoder_cache_bytes"_a = 0, "max_vision_tile"_a = 384,
          "device: \"cpu\" or \"cuda\". provider: of segments, \"cublaslt\" or \"exact\" on cuda;\n"
          "\"\" = the device's first. max_batch_size: sequences that run at once. max_num_tokens: "
          "token budget of one step.\n"
          "max_prefill_chunk: longest piece of one prompt in a step. max_queue_size,\n"
          "max_queued_tokens: what may wait. kv_page_size: tokens of a KV page. max_kv_tokens:\n"
          "size of the KV pool, 0 = max_batch_size * min(context, 4096). default_max_tokens: for\n"
          "requests without max_tokens. max_draft_tokens: longest draft. max_rounds_in_flight:\n"
          "steps launched but not read, 1 or 2. num_threads: 0 = all cores. max_scripted_tokens:\n"
          "> 0 turns the test hooks of Request on. ring_history: L of the replay ring's flush\n"
          "rule, 0 = absorb at start. max_admission_passes: requests that may pass one that does\n"
          "not fit. max_image_pixels: of one picture, within the engine's limit. "
          "encoder_cache_bytes:\n"
          "for encoded pictures that have a digest, 0 = off. max_vision_tile: patches that go\n"
          "through a stage of the encoder together, a multiple of 16.")
      .def_rw("device", &ExecutorConfig::device)
      .def_rw("provider", &ExecutorConfig::provider)
      .def_rw("max_batch_size", &ExecutorConfig::max_batch_size)
      .def_rw("max_num_tokens", &ExecutorConfig::max_num_tokens)
      .def_rw("max_prefill_chunk", &ExecutorConfig::max_prefill_chunk)
      .def_rw("max_queue_size", &ExecutorConfig::max_queue_size)
      .def_rw("max_queued_tokens", &ExecutorConfig::max_queued_tokens)
      .def_rw("kv_page_size", &ExecutorConfig::kv_page_size)
      .def_rw("max_kv_tokens", &ExecutorConfig::max_kv_tokens)
      .def_rw("default_max_tokens", &ExecutorConfig::default_max_tokens)
      .def_rw("max_draft_tokens", &ExecutorConfig::max_draft_tokens)
      .def_rw("max_rounds_in_flight", &ExecutorConfig::max_rounds_in_flight)
      .def_rw("num_threads", &ExecutorConfig::num_threads)
      .def_rw("iter_stats_max_iterations", &ExecutorConfig::iter_stats_max_iterations)
      .def_rw("max_scripted_tokens", &ExecutorConfig::max_scripted_tokens)
      .def_rw("ring_history", &ExecutorConfig::ring_history)
      .def_rw("max_admission_passes", &ExecutorConfig::max_admission_passes)
      .def_rw("max_image_pixels", &ExecutorConfig::max_image_pixels)
      .def_rw("encoder_cache_bytes", &ExecutorConfig::encoder_cache_bytes)
      .def_rw("max_vision_tile", &ExecutorConfig::max_vision_tile);
}

void bind_request(nb::module_& module) {
  nb::class_<Request>(module, "Request", "One call.")
      .def(
          "__init__",
          [](Request* self, std::vector<TokenId> input_token_ids,
             std::optional<std::int32_t> max_tokens, const SamplingConfig& sampling,
             const OutputConfig& output, std::optional<std::vector<TokenId>> end_ids,
             bool ignore_end_ids, std::vector<TokenId> stop_ids,
             std::vector<std::string> stop_strings, bool include_stop, bool skip_special_tokens,
             std::optional<std::int64_t> allotted_time_ms, std::string client_id,
             std::vector<TokenId> forced_tokens, std::vector<std::int32_t> draft_script,
             bool force_tokens, std::int32_t fail_after_tokens, std::int32_t min_tokens,
             std::optional<RepetitionLimits> repetition_guard, std::vector<Image> images,
             bool return_progress) {
            new (self) Request{std::move(input_token_ids),
                               max_tokens,
                               min_tokens,
                               sampling,
                               output,
                               std::move(end_ids),
                               ignore_end_ids,
                               std::move(stop_ids),
                               std::move(stop_strings),
                               std::move(images),
                               return_progress,
                               include_stop,
                               skip_special_tokens,
                               allotted_time_ms,
                               std::move(client_id),
                               repetition_guard,
                               std::move(forced_tokens),
                               std::move(draft_script),
                               force_tokens,
                               fail_after_tokens};
          },
          "input_token_ids"_a, "max_tokens"_a = nb::none(), nb::kw_only(),
          "sampling"_a = SamplingConfig{}, "output"_a = OutputConfig{}, "end_ids"_a = nb::none(),
          "ignore_end_ids"_a = false, "stop_ids"_a = std::vector<TokenId>{},
          "stop_strings"_a = std::vector<std::string>{}, "include_stop"_a = false,
          "skip_special_tokens"_a = true, "allotted_time_ms"_a = nb::none(), "client_id"_a = "",
          "forced_tokens"_a = std::vector<TokenId>{},
          "draft_script"_a = std::vector<std::int32_t>{}, "force_tokens"_a = true,
          "fail_after_tokens"_a = 0, "min_tokens"_a = 0, "repetition_guard"_a = nb::none(),
          "images"_a = std::vector<Image>{}, "return_progress"_a = false,
          "max_tokens: >= 1, None = ExecutorConfig.default_max_tokens. min_tokens: at most\n"
          "max_tokens; before, no end id comes and no stop string or repetition counts. end_ids:\n"
          "None = the engine's. stop_ids: end the text beside those; the text of one is part of "
          "it\n"
          "with include_stop. repetition_guard: None = off. allotted_time_ms: from enqueue.\n"
          "images: one for each run of placeholders (EngineInfo.image_token_id) among the ids,\n"
          "which is as long as the picture has tokens. return_progress: responses say where the\n"
          "request is before its first token. The others are test hooks: forced_tokens, what the\n"
          "target says in place of its own choice; draft_script, how many drafts of it are right "
          "in\n"
          "each round; force_tokens, False if it is only drafted and not said; fail_after_tokens,\n"
          "after how many tokens of this request the loop fails.")
      .def_rw("input_token_ids", &Request::input_token_ids)
      .def_rw("max_tokens", &Request::max_tokens)
      .def_rw("sampling", &Request::sampling)
      .def_rw("output", &Request::output)
      .def_rw("end_ids", &Request::end_ids)
      .def_rw("ignore_end_ids", &Request::ignore_end_ids)
      .def_rw("stop_ids", &Request::stop_ids)
      .def_rw("stop_strings", &Request::stop_strings)
      .def_rw("include_stop", &Request::include_stop)
      .def_rw("skip_special_tokens", &Request::skip_special_tokens)
      .def_rw("repetition_guard", &Request::repetition_guard)
      .def_rw("allotted_time_ms", &Request::allotted_time_ms)
      .def_rw("client_id", &Request::client_id)
      .def_rw("forced_tokens", &Request::forced_tokens)
      .def_rw("draft_script", &Request::draft_script)
      .def_rw("force_tokens", &Request::force_tokens)
      .def_rw("fail_after_tokens", &Request::fail_after_tokens)
      .def_rw("min_tokens", &Request::min_tokens)
      .def_rw("images", &Request::images)
      .def_rw("return_progress", &Request::return_progress);
}

void bind_reports(nb::module_& module) {
  nb::class_<RequestStats>(module, "RequestStats",
                           "Steady-clock times (ns) and counts of one request.")
      .def_ro("arrival_ns", &RequestStats::arrival_ns)
      .def_ro("first_scheduled_ns", &RequestStats::first_scheduled_ns)
      .def_ro("vision_start_ns", &RequestStats::vision_start_ns)
      .def_ro("vision_end_ns", &RequestStats::vision_end_ns)
      .def_ro("prefill_start_ns", &RequestStats::prefill_start_ns)
      .def_ro("first_token_ns", &RequestStats::first_token_ns)
      .def_ro("last_token_ns", &RequestStats::last_token_ns)
      .def_ro("num_prefill_chunks", &RequestStats::num_prefill_chunks)
      .def_ro("num_steps", &RequestStats::num_steps)
      .def_ro("num_drafted", &RequestStats::num_drafted)
      .def_ro("num_accepted", &RequestStats::num_accepted);

  nb::class_<TokenCandidate>(module, "TokenCandidate", "One of the likeliest tokens.")
      .def_ro("id", &TokenCandidate::id)
      .def_prop_ro(
          "piece", [](const TokenCandidate& self) { return bytes_of(self.piece); },
          "The token's bytes, which need not be whole characters.")
      .def_ro("logprob", &TokenCandidate::logprob);

  nb::class_<TokenRecord>(module, "TokenRecord",
                          "One emitted token; logprobs are of the raw logits, natural logarithms.")
      .def_ro("id", &TokenRecord::id)
      .def_prop_ro(
          "piece", [](const TokenRecord& self) { return bytes_of(self.piece); },
          "The token's bytes, which need not be whole characters; empty for a hidden special "
          "token.")
      .def_ro("logprob", &TokenRecord::logprob)
      .def_ro("rank", &TokenRecord::rank, "1 + how many tokens were likelier.")
      .def_ro("candidates", &TokenRecord::candidates, "Likeliest first.");

  nb::class_<Response>(module, "Response", "What became of a request since its last response.")
      .def_ro("request_id", &Response::request_id)
      .def_ro("text", &Response::text)
      .def_ro("token_ids", &Response::token_ids)
      .def_ro("records", &Response::records)
      .def_ro("is_final", &Response::is_final)
      .def_ro("finish_reason", &Response::finish_reason)
      .def_ro("stop_string", &Response::stop_string)
      .def_ro("end_id", &Response::end_id)
      .def_ro("num_prompt_tokens", &Response::num_prompt_tokens)
      .def_ro("num_completion_tokens", &Response::num_completion_tokens)
      .def_ro("error", &Response::error)
      .def_ro("stats", &Response::stats)
      .def(
          "take_context_logits", [](Response& self) { return logit_array(self.context_logits); },
          nb::sig("def take_context_logits(self) -> numpy.typing.NDArray[numpy.float32] | None"),
          "Moves out fp32 [num_prompt_tokens, vocab_size]; None unless asked for, and final.")
      .def(
          "take_generation_logits",
          [](Response& self) { return logit_array(self.generation_logits); },
          nb::sig("def take_generation_logits(self) -> numpy.typing.NDArray[numpy.float32] | None"),
          "Moves out fp32 [num_completion_tokens, vocab_size]; None unless asked for, and final.")
      .def_ro("progress", &Response::progress)
      .def(
          "take_image_embeddings",
          [](Response& self) { return logit_array(self.image_embeddings); },
          nb::sig("def take_image_embeddings(self) -> numpy.typing.NDArray[numpy.float32] | None"),
          "Moves out fp32 [tokens of all pictures, hidden_size]; None unless asked for, and "
          "final.");

  nb::class_<IterationStats>(module, "IterationStats", "One iteration of the loop.")
      .def_ro("iteration", &IterationStats::iteration)
      .def_ro("timestamp_ns", &IterationStats::timestamp_ns)
      .def_ro("latency_ns", &IterationStats::latency_ns)
      .def_ro("num_active", &IterationStats::num_active)
      .def_ro("num_queued", &IterationStats::num_queued)
      .def_ro("num_context_tokens", &IterationStats::num_context_tokens)
      .def_ro("num_generation_rows", &IterationStats::num_generation_rows)
      .def_ro("num_emitted_tokens", &IterationStats::num_emitted_tokens)
      .def_ro("num_drafted", &IterationStats::num_drafted)
      .def_ro("num_accepted", &IterationStats::num_accepted)
      .def_ro("num_completed", &IterationStats::num_completed)
      .def_ro("pages_used", &IterationStats::pages_used)
      .def_ro("slots_used", &IterationStats::slots_used)
      .def_ro("vision_ns", &IterationStats::vision_ns);

  nb::class_<LoadReport>(module, "LoadReport", "How busy an executor is.")
      .def_ro("num_running", &LoadReport::num_running)
      .def_ro("num_queued", &LoadReport::num_queued)
      .def_ro("num_queued_tokens", &LoadReport::num_queued_tokens)
      .def_ro("slots_used", &LoadReport::slots_used)
      .def_ro("slots_total", &LoadReport::slots_total)
      .def_ro("pages_used", &LoadReport::pages_used)
      .def_ro("pages_total", &LoadReport::pages_total)
      .def_ro("page_size", &LoadReport::page_size)
      .def_ro("silence_ns", &LoadReport::silence_ns)
      .def_ro("oldest_queued_ns", &LoadReport::oldest_queued_ns)
      .def_ro("encoder_cache_bytes", &LoadReport::encoder_cache_bytes)
      .def_ro("encoder_cache_hits", &LoadReport::encoder_cache_hits)
      .def_ro("encoder_cache_misses", &LoadReport::encoder_cache_misses);

  nb::class_<EngineInfo>(module, "EngineInfo", "What an engine says of itself.")
      .def_ro("engine_id", &EngineInfo::engine_id)
      .def_ro("model_name", &EngineInfo::model_name)
      .def_ro("architecture", &EngineInfo::architecture)
      .def_ro("end_ids", &EngineInfo::end_ids)
      .def_ro("vocab_size", &EngineInfo::vocab_size)
      .def_ro("context_len", &EngineInfo::context_len)
      .def_ro("num_layers", &EngineInfo::num_layers)
      .def_ro("has_vision", &EngineInfo::has_vision)
      .def_ro("image_token_id", &EngineInfo::image_token_id)
      .def_ro("image_factor", &EngineInfo::image_factor)
      .def_ro("min_image_pixels", &EngineInfo::min_image_pixels)
      .def_ro("max_image_pixels", &EngineInfo::max_image_pixels)
      .def_ro("vision_bytes", &EngineInfo::vision_bytes);
}

}  // namespace

void bind_executor(nb::module_& module) {
  bind_configs(module);
  bind_request(module);
  bind_reports(module);

  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Executor>(
      module, "Executor",
      "Generates tokens with one engine, on a loop thread of its own. Every method "
      "may be called from any thread.")
      .def(nb::init<const std::filesystem::path&, ExecutorConfig>(), "engine_dir"_a,
           "config"_a = ExecutorConfig{},
           nb::sig("def __init__(self, engine_dir: str | os.PathLike[str], config: "
                   "ExecutorConfig = ...) -> None"),
           unlocked,
           "Loads an engine directory and starts the loop.\n\n"
           "Raises:\n"
           "    EngineError: the engine does not fit itself or this runtime.\n"
           "    ValueError: the config cannot work.")
      .def(
          "enqueue_request",
          [](Executor& self, const Request& request) {
            Request copy = request;  // while no other thread of Python can change it
            const nb::gil_scoped_release release;
            return self.enqueue_request(std::move(copy));
          },
          "request"_a,
          "Queues a request and returns its id at once.\n\n"
          "Raises:\n"
          "    ValueError: names the field that is wrong.\n"
          "    CapacityError: the queue is full.\n"
          "    EngineLost: the loop has ended.")
      .def("cancel_request", &Executor::cancel_request, "request_id"_a, unlocked,
           "Asks for the end of a request; its final response still comes.")
      .def(
          "await_responses",
          [](Executor& self, std::optional<double> timeout_s) {
            const auto timeout = timeout_of(timeout_s);
            const nb::gil_scoped_release release;
            return self.await_responses(timeout);
          },
          "timeout_s"_a = nb::none(),
          "Responses that are ready, waiting for some if there are none. Empty on timeout and\n"
          "after the loop has ended.")
      .def("take_responses", &Executor::take_responses, unlocked,
           "Responses that are ready; never waits. Clears response_fd.")
      .def_prop_ro("response_fd", &Executor::response_descriptor,
                   "An eventfd: readable once per step in which responses became ready.")
      .def_prop_ro("num_responses_ready", &Executor::num_responses_ready)
      .def("get_latest_iteration_stats", &Executor::get_latest_iteration_stats, unlocked,
           "Statistics of the iterations since the last call.")
      .def("load", &Executor::load, unlocked, "How busy the executor is.")
      .def("can_enqueue_requests", &Executor::can_enqueue_requests, unlocked)
      .def("engine_error", &Executor::engine_error, unlocked,
           "What ended the loop, if an error did.")
      .def("shutdown", &Executor::shutdown, unlocked,
           "Cancels what runs, delivers the final responses and ends the loop. Idempotent.")
      .def_prop_ro("engine", &Executor::engine, nb::rv_policy::reference_internal)
      .def_prop_ro("config", &Executor::config, nb::rv_policy::copy, "A copy: it is fixed.");
}

}  // namespace deltaflash
