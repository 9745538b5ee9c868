#include "runtime/src/scheduler.h"

#include <algorithm>
#include <array>

namespace deltaflash {
namespace {

/// Whether the next token is the arg max of the logits as the model gives them.
bool is_plain_greedy(const Request& request) {
  const SamplingConfig& sampling = request.sampling;
  return sampling.temperature == 0 && sampling.repetition_penalty == 1 &&
         sampling.presence_penalty == 0 && sampling.frequency_penalty == 0 &&
         sampling.logit_bias.empty() && request.min_tokens == 0;
}

bool wants_logprobs(const Request& request) { return request.output.top_logprobs.has_value(); }

/// Rotary positions of the next `count` tokens of a prompt, axis by axis.
void add_positions(const Sequence& sequence, std::int64_t count,
                   std::array<std::vector<std::int32_t>, 3>& positions) {
  const std::vector<std::int32_t>& all = sequence.layout.positions;
  for (std::size_t axis = 0; axis < positions.size(); ++axis) {
    for (std::int64_t i = sequence.num_prefilled; i < sequence.num_prefilled + count; ++i) {
      const auto token = static_cast<std::size_t>(i);
      positions[axis].push_back(all.empty()
                                    ? static_cast<std::int32_t>(i)
                                    : all[axis * sequence.request.input_token_ids.size() + token]);
    }
  }
}

/// The rows of pictures among the next `count` tokens of a prompt, whose ids are the plan's last.
void add_images(const Sequence& sequence, std::int64_t count, StepPlan& plan) {
  const std::int64_t begin = sequence.num_prefilled;
  const auto packed = static_cast<std::int64_t>(plan.token_ids.size()) - count;
  for (std::size_t i = 0; i < sequence.embeddings.size(); ++i) {
    const ImageSpan& span = sequence.layout.images[i];
    const std::int64_t first = std::max(begin, span.first_token);
    const std::int64_t end = std::min(begin + count, span.first_token + span.num_tokens);
    if (first < end) {
      const ImageEmbeddings& rows = *sequence.embeddings[i];
      plan.image_rows.push_back(
          {.first_token = packed + first - begin,
           .num_tokens = end - first,
           .values = rows.values.get() + (first - span.first_token) * rows.width});
    }
  }
}

}  // namespace

Scheduler::Scheduler(const ExecutorConfig& config, std::int64_t num_pages, std::int64_t max_logits)
    : config_(config), max_logits_(max_logits), pages_(num_pages, config.kv_page_size) {
  for (std::int32_t slot = config.max_batch_size - 1; slot >= 0; --slot) {
    free_slots_.push_back(slot);
  }
}

void Scheduler::enqueue(std::shared_ptr<Sequence> sequence) {
  waiting_.push_back(std::move(sequence));
}

std::int64_t Scheduler::pages_needed(std::int64_t num_tokens) const {
  // A finished row may run idle rounds, and those write up to two rows of drafts past its end.
  return pages_.pages_for(num_tokens + 2 * (config_.max_draft_tokens + std::int64_t{1}));
}

std::int64_t Scheduler::num_slots_used() const {
  return config_.max_batch_size - static_cast<std::int64_t>(free_slots_.size());
}

std::vector<std::shared_ptr<Sequence>> Scheduler::admit() {
  std::vector<std::shared_ptr<Sequence>> admitted;
  std::vector<std::shared_ptr<Sequence>> passed;
  for (auto next = waiting_.begin(); next != waiting_.end() && !free_slots_.empty();) {
    const std::shared_ptr<Sequence> sequence = *next;
    const std::int64_t needed = pages_needed(sequence->num_prompt_tokens() + sequence->max_tokens);
    if (needed > pages_.num_free()) {
      if (sequence->num_passes >= config_.max_admission_passes) {
        break;
      }
      passed.push_back(sequence);
      ++next;
      continue;
    }
    for (const auto& earlier : passed) {
      ++earlier->num_passes;
    }
    sequence->slot = free_slots_.back();
    free_slots_.pop_back();
    sequence->pages = pages_.take(needed);
    sequence->stage = Stage::kPrefill;
    running_.push_back(sequence);
    admitted.push_back(sequence);
    next = waiting_.erase(next);
    if (std::any_of(passed.begin(), passed.end(), [this](const auto& earlier) {
          return earlier->num_passes >= config_.max_admission_passes;
        })) {
      break;
    }
  }
  return admitted;
}

std::int64_t Scheduler::verify_len(const Sequence& sequence) const {
  if (sequence.request.draft_script.empty()) {
    return 1;
  }
  const std::int64_t room = sequence.max_tokens - sequence.num_emitted - 1;
  return 1 + std::clamp<std::int64_t>(room, 0, config_.max_draft_tokens);
}

bool Scheduler::takes_part(const Sequence& sequence) const {
  // Each emitting step in flight emits at least one token, if the sequence still runs by then.
  return sequence.stage == Stage::kDecode &&
         sequence.num_emitted + sequence.num_sampling_in_flight < sequence.max_tokens;
}

bool Scheduler::has_verify() const {
  return std::any_of(running_.begin(), running_.end(),
                     [this](const auto& sequence) { return takes_part(*sequence); });
}

bool Scheduler::has_prefill() const {
  return std::any_of(running_.begin(), running_.end(), [this](const auto& sequence) {
    return sequence->stage == Stage::kPrefill && num_available(*sequence) > 0;
  });
}

/// Prompt tokens that may be launched, as far as pictures are concerned.
std::int64_t Scheduler::num_available(const Sequence& sequence) const {
  std::int64_t end = sequence.num_ready_tokens();
  if (end < sequence.num_prompt_tokens() && config_.max_prefill_chunk >= kPrefillAlignment) {
    end = end / kPrefillAlignment * kPrefillAlignment;
  }
  return end - sequence.num_prefilled;
}

std::vector<ScheduledStep> Scheduler::plan(std::int64_t max_prefill_tokens) {
  std::vector<ScheduledStep> steps;
  // Verify rows first: a prompt that ends in this iteration decodes from the next one on, so that
  // the prefill cannot add rows to what it has left room for.
  ScheduledStep verify = plan_verify();
  std::int64_t budget = config_.max_num_tokens;
  for (const StepRow& row : verify.plan.rows) {
    budget -= row.num_tokens;
  }
  ScheduledStep prefill = plan_prefill(std::min(budget, max_prefill_tokens));
  for (ScheduledStep* step : {&verify, &prefill}) {
    if (!step->rows.empty()) {
      steps.push_back(std::move(*step));
    }
  }
  return steps;
}

ScheduledStep Scheduler::plan_prefill(std::int64_t budget) {
  ScheduledStep step;
  step.plan.prefill = true;
  step.plan.greedy_only = true;
  std::int64_t logits_left = max_logits_;
  std::array<std::vector<std::int32_t>, 3> positions;
  for (const auto& sequence : running_) {
    if (sequence->stage != Stage::kPrefill || num_available(*sequence) <= 0) {
      continue;
    }
    const std::int64_t begin = sequence->num_prefilled;
    const std::int64_t left = sequence->num_prompt_tokens() - begin;
    const bool all_logits = sequence->request.output.return_context_logits;
    std::int64_t most = std::min<std::int64_t>(budget, config_.max_prefill_chunk);
    most = all_logits ? std::min(most, logits_left) : (logits_left > 0 ? most : 0);
    std::int64_t count = std::min(num_available(*sequence), most);
    if (count < left && config_.max_prefill_chunk >= kPrefillAlignment) {
      count = (begin + count) / kPrefillAlignment * kPrefillAlignment - begin;
    }
    if (count <= 0) {
      break;
    }
    const bool last = count == left;
    const auto first = sequence->request.input_token_ids.begin() + begin;
    step.plan.token_ids.insert(step.plan.token_ids.end(), first, first + count);
    add_images(*sequence, count, step.plan);
    add_positions(*sequence, count, positions);
    step.plan.rows.push_back({.slot = sequence->slot,
                              .num_tokens = static_cast<std::int32_t>(count),
                              .samples = last,
                              .all_logits = all_logits});
    step.plan.read_logits |=
        all_logits || (last && sequence->request.output.return_generation_logits);
    step.plan.greedy_only &= is_plain_greedy(sequence->request);
    step.plan.logprobs |= last && wants_logprobs(sequence->request);
    step.rows.push_back(sequence);
    budget -= count;
    logits_left -= all_logits ? count : static_cast<std::int64_t>(last);
    sequence->num_prefilled += count;
    ++sequence->num_in_flight;
    if (last) {
      sequence->stage = Stage::kDecode;
      ++sequence->num_sampling_in_flight;
    }
  }
  for (const auto& axis : positions) {
    step.plan.positions.insert(step.plan.positions.end(), axis.begin(), axis.end());
  }
  return step;
}

ScheduledStep Scheduler::plan_verify() {
  ScheduledStep step;
  step.plan.greedy_only = true;
  for (const auto& sequence : running_) {
    if (!takes_part(*sequence)) {
      continue;
    }
    step.plan.rows.push_back({.slot = sequence->slot,
                              .num_tokens = static_cast<std::int32_t>(verify_len(*sequence)),
                              .samples = true,
                              .all_logits = true});
    step.plan.scripted_draft |= !sequence->request.draft_script.empty();
    step.plan.read_logits |= sequence->request.output.return_generation_logits;
    step.plan.greedy_only &= is_plain_greedy(sequence->request);
    step.plan.logprobs |= wants_logprobs(sequence->request);
    step.rows.push_back(sequence);
    ++sequence->num_in_flight;
    ++sequence->num_sampling_in_flight;
  }
  return step;
}

void Scheduler::finish(const std::shared_ptr<Sequence>& sequence) {
  if (sequence->stage == Stage::kQueued) {
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), sequence));
  }
  sequence->stage = Stage::kFinished;
  if (sequence->num_in_flight == 0) {
    release(*sequence);
  }
}

void Scheduler::step_read(const ScheduledStep& step) {
  for (std::size_t row = 0; row < step.rows.size(); ++row) {
    Sequence& sequence = *step.rows[row];
    --sequence.num_in_flight;
    sequence.num_sampling_in_flight -= static_cast<std::int32_t>(step.plan.rows[row].samples);
    if (sequence.stage == Stage::kFinished && sequence.num_in_flight == 0) {
      release(sequence);
    }
  }
}

void Scheduler::release(Sequence& sequence) {
  if (sequence.slot < 0) {
    return;
  }
  free_slots_.push_back(sequence.slot);
  pages_.give_back(sequence.pages);
  sequence.slot = -1;
  sequence.pages.clear();
  std::erase_if(running_, [&](const auto& running) { return running.get() == &sequence; });
}

}  // namespace deltaflash
