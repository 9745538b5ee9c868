#include "runtime/src/executor.h"

#include <algorithm>
#include <utility>

#include "plugins/common/error.h"
#include "runtime/src/clock.h"
#include "runtime/src/cuda_library.h"
#include "runtime/src/request_checks.h"
#include "runtime/src/token_records.h"

namespace deltaflash {
namespace {

// Of pictures, when no stream waits: cancellations and new requests do.
constexpr std::int64_t kIdleSliceNs = 50'000'000;
constexpr std::int64_t kLongestTimeMs = 1'000'000'000'000;  // 31 years, as good as for ever

std::unique_ptr<Device> make_device(const ExecutorConfig& config) {
  if (config.device == "cuda") {
    return open_cuda_device({.provider = config.provider.empty() ? "cublaslt" : config.provider,
                             .max_tokens = config.max_num_tokens});
  }
  if (config.device != "cpu") {
    refuse("device", "\"" + config.device + "\"", "\"cpu\" or \"cuda\"");
  }
  if (!config.provider.empty() && config.provider != "cpu") {
    refuse("provider", "\"" + config.provider + "\"", "\"cpu\" on device cpu");
  }
  return make_cpu_device(config.num_threads);
}

std::optional<std::int64_t> allotted_ns(const Request& request) {
  if (!request.allotted_time_ms) {
    return std::nullopt;
  }
  return std::min(*request.allotted_time_ms, kLongestTimeMs) * 1'000'000;
}

SlotState slot_state(const Sequence& sequence, const Request& request) {
  SlotState state{};
  state.num_remaining = static_cast<std::int32_t>(sequence.max_tokens);
  state.num_forced = static_cast<std::int32_t>(request.forced_tokens.size());
  state.num_script = static_cast<std::int32_t>(request.draft_script.size());
  state.num_end_ids = static_cast<std::int32_t>(sequence.end_ids.size());
  state.rope_delta = sequence.layout.rope_delta;
  std::copy(sequence.end_ids.begin(), sequence.end_ids.end(), state.end_ids);
  state.temperature = request.sampling.temperature;
  state.top_p = request.sampling.top_p;
  state.min_p = request.sampling.min_p;
  state.top_k = request.sampling.top_k;
  state.seed = sequence.seed;
  // In the table 0 is off, and spares the row a look at its token counts.
  const float repetition = request.sampling.repetition_penalty;
  state.repetition_penalty = repetition == 1 ? 0 : repetition;
  state.presence_penalty = request.sampling.presence_penalty;
  state.frequency_penalty = request.sampling.frequency_penalty;
  state.num_biases = static_cast<std::int32_t>(request.sampling.logit_bias.size());
  state.min_tokens = request.min_tokens;
  state.forced_drafts = request.force_tokens ? 0 : 1;
  state.num_logprobs = static_cast<std::int16_t>(1 + request.output.top_logprobs.value_or(-1));
  return state;
}

}  // namespace

Executor::Executor(const std::filesystem::path& engine_dir, ExecutorConfig config)
    : config_(std::move(config)),
      engine_(read_engine_info(engine_dir)),
      vocabulary_(engine_dir / "vocab.bin"),
      seeds_(std::random_device{}()) {
  check_config(config_);
  const Program program = read_program(engine_dir / "program.json");
  const ModelConfig& model = program.config;
  engine_.vocab_size = model.vocab_size;
  engine_.context_len = model.context_len;
  engine_.num_layers = model.num_layers;
  if (static_cast<std::int64_t>(vocabulary_.size()) != model.vocab_size) {
    throw EngineError("vocab.bin has " + std::to_string(vocabulary_.size()) +
                      " ids, expected the program's vocab_size " +
                      std::to_string(model.vocab_size));
  }
  const std::int64_t row = config_.max_draft_tokens + std::int64_t{1};
  const auto pages_for = [this](std::int64_t tokens) {
    return (tokens + config_.kv_page_size - 1) / config_.kv_page_size;
  };
  const std::int64_t num_pages = pages_for(pool_tokens(config_, model));
  runner_ = std::make_unique<ModelRunner>(
      engine_dir,
      RunnerLimits{.num_slots = config_.max_batch_size,
                   .max_tokens = config_.max_num_tokens,
                   .max_prefill_chunk = std::min(config_.max_prefill_chunk, config_.max_num_tokens),
                   .num_pages = num_pages,
                   .page_size = config_.kv_page_size,
                   .max_pages = std::min(num_pages, pages_for(model.context_len + 2 * row)),
                   .max_draft = config_.max_draft_tokens,
                   .history_limit = config_.ring_history,
                   .max_forced = config_.max_scripted_tokens,
                   // A prefill and a verify step an iteration, and the one being planned.
                   .max_unread = 2 * (config_.max_rounds_in_flight + std::int64_t{1}),
                   .max_image_pixels = config_.max_image_pixels,
                   .max_vision_tile = config_.max_vision_tile},
      make_device(config_), program);
  if (VisionEncoder* encoder = runner_->vision()) {
    vision_ = std::make_unique<VisionQueue>(*encoder, config_.encoder_cache_bytes);
    const VisionConfig& vision = encoder->config();
    engine_.has_vision = true;
    engine_.image_token_id = vision.image_token_id;
    engine_.image_factor = vision.factor();
    engine_.min_image_pixels = vision.min_pixels;
    engine_.max_image_pixels = std::min(config_.max_image_pixels, vision.max_pixels);
    engine_.vision_bytes = encoder->reserved_bytes();
  }
  scheduler_ = std::make_unique<Scheduler>(config_, num_pages, runner_->max_logits());
  load_.slots_total = config_.max_batch_size;
  load_.pages_total = num_pages;
  load_.page_size = config_.kv_page_size;
  last_progress_ns_ = now_ns();
  loop_ = std::thread([this] { run(); });
}

Executor::~Executor() { shutdown(); }

std::int64_t Executor::pool_room(std::int64_t num_prompt_tokens) const {
  const std::int64_t row = config_.max_draft_tokens + std::int64_t{1};
  return scheduler_->num_pages() * config_.kv_page_size - 2 * row - num_prompt_tokens;
}

Executor::SequencePtr Executor::make_sequence(Request request) {
  const auto num_prompt = static_cast<std::int64_t>(request.input_token_ids.size());
  const TextStreamOptions text_options{.stops = request.stop_strings,
                                       .include_stop = request.include_stop,
                                       .skip_special_tokens = request.skip_special_tokens,
                                       .min_tokens = request.min_tokens};
  auto sequence = std::make_shared<Sequence>(0, std::move(request), vocabulary_, text_options);
  const Request& wanted = sequence->request;
  if (vision_) {
    sequence->layout =
        lay_out_prompt(wanted.input_token_ids, wanted.images, runner_->vision()->config());
  }
  const std::int64_t room = std::min(engine_.context_len - num_prompt, pool_room(num_prompt));
  sequence->max_tokens =
      std::min<std::int64_t>(wanted.max_tokens.value_or(config_.default_max_tokens), room);
  if (!wanted.ignore_end_ids) {
    sequence->end_ids = wanted.end_ids.value_or(engine_.end_ids);
  }
  for (const TokenId id : wanted.stop_ids) {
    if (std::find(sequence->end_ids.begin(), sequence->end_ids.end(), id) ==
        sequence->end_ids.end()) {
      sequence->end_ids.push_back(id);
    }
  }
  sequence->stats.arrival_ns = now_ns();
  if (const auto allotted = allotted_ns(wanted)) {
    sequence->deadline_ns = sequence->stats.arrival_ns + *allotted;
  }
  return sequence;
}

RequestId Executor::enqueue_request(Request request) {
  check_request(request, config_, engine_,
                pool_room(static_cast<std::int64_t>(request.input_token_ids.size())));
  SequencePtr sequence = make_sequence(std::move(request));
  const std::int64_t num_tokens = sequence->num_prompt_tokens();
  const std::lock_guard lock(mutex_);
  if (stopping_ || ended_) {
    throw EngineLost(engine_error_.value_or("the executor has been shut down"));
  }
  const std::int64_t most = std::int64_t{config_.max_batch_size} + config_.max_queue_size;
  if (num_live_ >= most) {
    throw CapacityError("the queue is full: " + std::to_string(num_live_) +
                        " requests run or wait, at most " + std::to_string(most) + " may");
  }
  if (num_waiting_tokens_ > 0 && num_waiting_tokens_ + num_tokens > config_.max_queued_tokens) {
    throw CapacityError("the queue is full: " + std::to_string(num_waiting_tokens_) +
                        " prompt tokens wait, at most " +
                        std::to_string(config_.max_queued_tokens) + " may");
  }
  sequence->id = ++last_id_;
  sequence->seed = sequence->request.sampling.seed.value_or(seeds_());
  inbox_.push_back(sequence);
  if (num_live_++ == 0) {
    last_progress_ns_ = now_ns();  // an idle time is no silence
  }
  num_waiting_tokens_ += num_tokens;
  if (oldest_arrival_ns_ == 0) {
    oldest_arrival_ns_ = sequence->stats.arrival_ns;
  }
  work_.notify_one();
  return sequence->id;
}

void Executor::cancel_request(RequestId id) {
  const std::lock_guard lock(mutex_);
  if (!ended_) {
    cancels_.push_back(id);
    work_.notify_one();
  }
}

std::vector<Response> Executor::await_responses(std::optional<std::chrono::nanoseconds> timeout) {
  return responses_.await(timeout);
}

std::vector<Response> Executor::take_responses() { return responses_.take(); }

std::vector<IterationStats> Executor::get_latest_iteration_stats() {
  const std::lock_guard lock(mutex_);
  std::vector<IterationStats> stats(stats_.begin(), stats_.end());
  stats_.clear();
  return stats;
}

LoadReport Executor::load() const {
  const std::lock_guard lock(mutex_);
  LoadReport report = load_;
  report.num_queued = std::max<std::int64_t>(0, num_live_ - report.num_running);
  report.num_queued_tokens = num_waiting_tokens_;
  const std::int64_t now = now_ns();
  report.silence_ns = num_live_ > 0 ? now - last_progress_ns_ : 0;
  report.oldest_queued_ns = oldest_arrival_ns_ > 0 ? now - oldest_arrival_ns_ : 0;
  return report;
}

bool Executor::can_enqueue_requests() const {
  const std::lock_guard lock(mutex_);
  return !stopping_ && !ended_;
}

std::optional<std::string> Executor::engine_error() const {
  const std::lock_guard lock(mutex_);
  return engine_error_;
}

void Executor::shutdown() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    work_.notify_one();
  }
  const std::lock_guard lock(join_mutex_);
  if (loop_.joinable()) {
    loop_.join();
  }
}

void Executor::run() {
  std::optional<std::string> error;
  try {
    while (wait_for_work()) {
      iterate();
    }
    cancel_all();
  } catch (const std::exception& caught) {
    error = caught.what();
  } catch (...) {
    error = "an exception of unknown type";
  }
  end(error);
}

void Executor::iterate() {
  const std::int64_t begin = now_ns();
  current_ = {};
  take_inbox();
  end_overdue();
  admit();
  // Running streams come first: what else there is to do goes in slices between their rounds.
  const bool paced = runner_->launch_waits() && scheduler_->has_verify();
  const bool encodes = vision_ && !vision_->empty() &&
                       (!paced || !scheduler_->has_prefill() || pace_.take_vision_turn());
  const std::int64_t prefill_tokens = encodes ? 0 : pace_.prefill_tokens(kPrefillAlignment);
  const bool launched = launch(paced ? scheduler_->plan(prefill_tokens) : scheduler_->plan());
  if (encodes) {
    encode(paced ? pace_.slice_ns() : kIdleSliceNs);
  }
  const auto allowed = static_cast<std::size_t>(config_.max_rounds_in_flight - 1);
  while (in_flight_.size() > (launched ? allowed : 0)) {
    read_oldest();
  }
  current_.timestamp_ns = now_ns();
  current_.latency_ns = current_.timestamp_ns - begin;
  report();
  responses_.publish();
}

bool Executor::wait_for_work() {
  std::unique_lock lock(mutex_);
  if (live_.empty() && in_flight_.empty()) {
    work_.wait(lock, [this] { return stopping_ || !inbox_.empty() || !cancels_.empty(); });
  }
  return !stopping_;
}

void Executor::take_inbox() {
  std::deque<SequencePtr> arrived;
  std::vector<RequestId> cancelled;
  {
    const std::lock_guard lock(mutex_);
    arrived.swap(inbox_);
    cancelled.swap(cancels_);
  }
  for (SequencePtr& sequence : arrived) {
    live_.emplace(sequence->id, sequence);
    show_progress(*sequence, ProgressPhase::kQueued);
    scheduler_->enqueue(std::move(sequence));
  }
  for (const RequestId id : cancelled) {
    if (const auto found = live_.find(id); found != live_.end()) {
      finish(SequencePtr(found->second), FinishReason::kCancelled, {});
    }
  }
}

void Executor::end_overdue() {
  const std::int64_t now = now_ns();
  std::vector<SequencePtr> overdue;
  for (const auto& [id, sequence] : live_) {
    if (sequence->deadline_ns > 0 && now >= sequence->deadline_ns) {
      overdue.push_back(sequence);
    }
  }
  for (const SequencePtr& sequence : overdue) {
    finish(sequence, FinishReason::kTimedOut, {});
  }
}

void Executor::cancel_all() {
  take_inbox();
  while (!live_.empty()) {
    finish(SequencePtr(live_.begin()->second), FinishReason::kCancelled, {});
  }
}

void Executor::admit() {
  for (const SequencePtr& sequence : scheduler_->admit()) {
    const Request& request = sequence->request;
    runner_->admit(sequence->slot, {.state = slot_state(*sequence, request),
                                    .pages = sequence->pages,
                                    .prompt = request.input_token_ids,
                                    .logit_bias = request.sampling.logit_bias,
                                    .forced = request.forced_tokens,
                                    .script = request.draft_script});
    sequence->stats.first_scheduled_ns = now_ns();
    if (vision_) {
      vision_->enqueue(sequence);
    }
    const std::lock_guard lock(mutex_);
    num_waiting_tokens_ -= sequence->num_prompt_tokens();
  }
}

bool Executor::launch(std::vector<ScheduledStep> steps) {
  for (const ScheduledStep& step : steps) {
    const std::int64_t begin = now_ns();
    runner_->launch(step.plan);
    const std::int64_t took = now_ns() - begin;
    for (std::size_t row = 0; row < step.rows.size(); ++row) {
      if (step.plan.prefill) {
        RequestStats& stats = step.rows[row]->stats;
        stats.prefill_start_ns = stats.num_prefill_chunks++ == 0 ? begin : stats.prefill_start_ns;
        current_.num_context_tokens += step.plan.rows[row].num_tokens;
        prompt_launched(*step.rows[row]);
      } else {
        ++current_.num_generation_rows;
      }
    }
    if (step.plan.prefill) {
      pace_.prefill_took(static_cast<std::int64_t>(step.plan.token_ids.size()), took);
    } else {
      pace_.round_took(took);
    }
  }
  if (steps.empty()) {
    return false;
  }
  in_flight_.push_back(std::move(steps));
  return true;
}

void Executor::read_oldest() {
  const std::vector<ScheduledStep> steps = std::move(in_flight_.front());
  in_flight_.pop_front();
  for (const ScheduledStep& step : steps) {
    const StepResult result = runner_->read();
    for (std::size_t row = 0; row < step.rows.size(); ++row) {
      take_row(step.rows[row], step.plan.rows[row], row, result, step.plan.prefill);
    }
    scheduler_->step_read(step);
  }
}

bool Executor::keeps_text(const Request& request, TokenId stop) const {
  const auto has = [stop](const std::vector<TokenId>& ids) {
    return std::find(ids.begin(), ids.end(), stop) != ids.end();
  };
  return request.include_stop && has(request.stop_ids) &&
         !has(request.end_ids.value_or(engine_.end_ids));
}

void Executor::take_row(const SequencePtr& sequence, const StepRow& row, std::size_t index,
                        const StepResult& result, bool prefill) {
  if (sequence->stage == Stage::kFinished) {
    return;  // an idle round of a sequence whose final response is out
  }
  const auto vocab = static_cast<std::size_t>(engine_.vocab_size);
  const auto copy_logits = [&](LogitRows& rows, std::size_t first, std::int64_t count) {
    const auto begin = result.logits.begin() + static_cast<std::ptrdiff_t>(first * vocab);
    rows.values.insert(
        rows.values.end(), begin,
        begin + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(count) * vocab));
    rows.num_rows += count;
  };
  const auto logit_start = static_cast<std::size_t>(result.logit_start[index]);
  if (prefill && row.all_logits) {
    copy_logits(sequence->context_logits, logit_start, row.num_tokens);
  }
  const std::int64_t num_emitted = result.num_emitted[index];
  if (num_emitted == 0) {
    return;
  }
  Response response;
  const auto reason_on_device = static_cast<FinishReason>(result.finish_reason[index]);
  const std::size_t first_token = index * static_cast<std::size_t>(result.max_emitted);
  const std::int32_t* tokens = result.tokens.data() + first_token;
  auto reason = FinishReason::kNotFinished;
  std::int64_t num_kept = 0;
  while (num_kept < num_emitted && reason == FinishReason::kNotFinished) {
    const TokenId token = tokens[num_kept++];
    response.token_ids.push_back(token);
    if (num_kept == num_emitted) {
      reason = reason_on_device;
    }
    // An end id ends the text; it is no part of it.
    const bool has_text = reason != FinishReason::kEndId || keeps_text(sequence->request, token);
    if (has_text && sequence->text.push(token)) {
      reason = FinishReason::kStopWords;
    }
    if (reason == FinishReason::kEndId) {
      response.end_id = token;
    }
    if (sequence->request.output.token_records) {
      sequence->records.push_back(token_record(
          *sequence, vocabulary_, result, first_token + static_cast<std::size_t>(num_kept) - 1));
    }
  }
  if (sequence->request.output.return_generation_logits) {
    const std::size_t last_context_row =
        prefill && row.all_logits ? static_cast<std::size_t>(row.num_tokens) - 1 : 0;
    copy_logits(sequence->generation_logits, logit_start + last_context_row, num_kept);
  }
  RequestStats& request_stats = sequence->stats;
  request_stats.last_token_ns = now_ns();
  if (sequence->num_emitted == 0) {
    request_stats.first_token_ns = request_stats.last_token_ns;
    if (sequence->request.return_progress) {
      response.progress = Progress{.phase = ProgressPhase::kDecoding, .fraction = {}};
    }
  }
  sequence->num_emitted += num_kept;
  current_.num_emitted_tokens += num_kept;
  if (const std::int32_t fail_at = sequence->request.fail_after_tokens;
      fail_at > 0 && sequence->num_emitted >= fail_at) {
    throw std::runtime_error("request " + std::to_string(sequence->id) + " made the loop fail");
  }
  if (!prefill) {
    const std::int64_t accepted = std::min<std::int64_t>(result.num_accepted[index], num_kept);
    ++request_stats.num_steps;
    request_stats.num_drafted += row.num_tokens - 1;
    request_stats.num_accepted += accepted;
    current_.num_drafted += row.num_tokens - 1;
    current_.num_accepted += accepted;
  }
  if (reason != FinishReason::kNotFinished) {
    finish(sequence, reason, std::move(response));
    return;
  }
  response.request_id = sequence->id;
  response.text = sequence->text.take_text();
  if (sequence->request.output.token_records) {
    release_records(
        *sequence, sequence->text.num_tokens_released() - sequence->num_records_released, response);
  }
  response.num_prompt_tokens = sequence->num_prompt_tokens();
  response.num_completion_tokens = sequence->num_emitted;
  response.stats = request_stats;
  responses_.push(std::move(response));
}

void Executor::finish(const SequencePtr& sequence, FinishReason reason, Response response) {
  // Releases text held back for a stop string; the tail may itself complete one.
  if (sequence->text.finish() && reason != FinishReason::kStopWords) {
    reason = FinishReason::kStopWords;
    response.end_id.reset();
  }
  response.request_id = sequence->id;
  response.text = sequence->text.take_text();
  release_records(*sequence, static_cast<std::int64_t>(sequence->records.size()), response);
  response.is_final = true;
  response.finish_reason = reason;
  if (reason == FinishReason::kStopWords) {
    response.stop_string = sequence->text.matched_stop();
  }
  response.num_prompt_tokens = sequence->num_prompt_tokens();
  response.num_completion_tokens = sequence->num_emitted;
  response.stats = sequence->stats;
  response.context_logits = std::move(sequence->context_logits);
  response.generation_logits = std::move(sequence->generation_logits);
  response.image_embeddings = std::move(sequence->image_embeddings);
  ++current_.num_completed;
  const bool was_waiting = sequence->stage == Stage::kQueued;
  scheduler_->finish(sequence);
  if (vision_) {
    vision_->remove(*sequence);
  }
  live_.erase(sequence->id);
  {
    const std::lock_guard lock(mutex_);
    --num_live_;
    if (was_waiting) {
      num_waiting_tokens_ -= sequence->num_prompt_tokens();
    }
  }
  responses_.push(std::move(response));
}

void Executor::end(const std::optional<std::string>& error) {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  engine_error_ = error;
  const auto fail = [&](const Sequence& sequence) {
    Response response;
    response.request_id = sequence.id;
    response.is_final = true;
    response.finish_reason = FinishReason::kCancelled;
    response.num_prompt_tokens = sequence.num_prompt_tokens();
    response.num_completion_tokens = sequence.num_emitted;
    response.stats = sequence.stats;
    response.error = error;
    responses_.push(std::move(response));
  };
  for (const auto& [id, sequence] : live_) {
    fail(*sequence);
  }
  for (const SequencePtr& sequence : inbox_) {
    fail(*sequence);
  }
  live_.clear();
  inbox_.clear();
  cancels_.clear();
  num_live_ = 0;
  num_waiting_tokens_ = 0;
  oldest_arrival_ns_ = 0;
  load_.num_running = 0;
  load_.slots_used = 0;
  load_.pages_used = 0;
  responses_.publish();
  responses_.close();
}

void Executor::report() {
  const std::lock_guard lock(mutex_);
  const auto& waiting = scheduler_->waiting();
  load_.num_running = static_cast<std::int64_t>(live_.size() - waiting.size());
  load_.slots_used = scheduler_->num_slots_used();
  load_.pages_used = scheduler_->num_pages_used();
  last_progress_ns_ = current_.timestamp_ns;
  oldest_arrival_ns_ = 0;
  if (!waiting.empty()) {
    oldest_arrival_ns_ = waiting.front()->stats.arrival_ns;
  } else if (!inbox_.empty()) {
    oldest_arrival_ns_ = inbox_.front()->stats.arrival_ns;
  }
  if (vision_) {
    load_.encoder_cache_bytes = vision_->cache().num_bytes();
    load_.encoder_cache_hits = vision_->cache().num_hits();
    load_.encoder_cache_misses = vision_->cache().num_misses();
  }
  if (current_.num_context_tokens + current_.num_generation_rows + current_.num_emitted_tokens +
          current_.num_completed + current_.vision_ns ==
      0) {
    return;  // woken for nothing, such as the cancel of an unknown id
  }
  current_.iteration = num_iterations_++;
  current_.num_active = load_.num_running;
  current_.num_queued = std::max<std::int64_t>(0, num_live_ - load_.num_running);
  current_.pages_used = load_.pages_used;
  current_.slots_used = load_.slots_used;
  stats_.push_back(current_);
  while (stats_.size() > static_cast<std::size_t>(config_.iter_stats_max_iterations)) {
    stats_.pop_front();
  }
}

}  // namespace deltaflash
