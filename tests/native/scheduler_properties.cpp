/// Runs the scheduler alone over random configs and loads, with a device that answers at random,
/// and checks what must hold in every iteration: the token budget, that decoding rows always run,
/// where prompts are cut, that no slot or page is lent twice or lost, and that every request ends.
///
///   scheduler_properties [CASES [SEED]]
#include <algorithm>
#include <deque>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "runtime/src/scheduler.h"
#include "tests/native/check.h"

namespace deltaflash {
namespace {

using SequencePtr = std::shared_ptr<Sequence>;

class Case {
 public:
  explicit Case(std::uint64_t seed)
      : random_(seed),
        config_(random_config()),
        num_pages_(draw(1, 40)),
        max_logits_(std::max<std::int64_t>(
            std::min(config_.max_prefill_chunk, config_.max_num_tokens),
            std::int64_t{config_.max_batch_size} * (config_.max_draft_tokens + 1))),
        scheduler_(config_, num_pages_, max_logits_) {}

  void run() {
    const std::int64_t num_requests = draw(1, 30);
    std::int64_t num_enqueued = 0;
    std::int64_t work_left = 0;  // a bound on the iterations to come: each must do something
    while (num_enqueued < num_requests || !live_.empty() || !in_flight_.empty()) {
      while (num_enqueued < num_requests && draw(0, 3) != 0) {
        work_left += enqueue(++num_enqueued);
      }
      cancel_some();
      admit();
      launch();
      work_left -= num_enqueued == num_requests ? 1 : 0;
      CHECK(work_left > -1000);
    }
    CHECK(scheduler_.waiting().empty());
    CHECK(scheduler_.running().empty());
    CHECK(scheduler_.num_slots_used() == 0);
    CHECK(scheduler_.num_pages_used() == 0);
  }

 private:
  std::int64_t draw(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random_);
  }

  ExecutorConfig random_config() {
    ExecutorConfig config;
    config.max_batch_size = static_cast<std::int32_t>(draw(1, 6));
    config.max_draft_tokens = static_cast<std::int32_t>(draw(0, 1) * draw(0, 15));
    const std::int64_t chunks[] = {1, 3, 63, 64, 65, 100, 128, 200, 1000};
    config.max_prefill_chunk = static_cast<std::int32_t>(chunks[draw(0, 8)]);
    // The least that check_config takes, or a little more.
    config.max_num_tokens = static_cast<std::int32_t>(
        config.max_batch_size * (config.max_draft_tokens + std::int64_t{1}) +
        std::min<std::int64_t>(kPrefillAlignment, config.max_prefill_chunk) +
        draw(0, 1) * draw(0, 300));
    config.kv_page_size = static_cast<std::int32_t>(draw(1, 64));
    config.max_rounds_in_flight = static_cast<std::int32_t>(draw(1, 2));
    config.max_admission_passes = static_cast<std::int32_t>(draw(0, 3));
    return config;
  }

  /// Returns a bound on the iterations that the request takes once it is alone.
  std::int64_t enqueue(std::int64_t id) {
    const std::int64_t row = config_.max_draft_tokens + std::int64_t{1};
    const std::int64_t room = num_pages_ * config_.kv_page_size - 2 * row;
    if (room < 2) {
      return 0;  // the executor refuses every request
    }
    const std::int64_t num_prompt = draw(1, std::min<std::int64_t>(room - 1, 400));
    Request request;
    request.input_token_ids.assign(static_cast<std::size_t>(num_prompt), 0);
    request.output.return_context_logits = draw(0, 3) == 0;
    request.output.return_generation_logits = draw(0, 3) == 0;
    if (draw(0, 1) == 0) {
      request.draft_script = {1};
    }
    auto sequence = std::make_shared<Sequence>(static_cast<RequestId>(id), std::move(request),
                                               vocabulary_, TextStreamOptions{});
    sequence->max_tokens = draw(1, std::min<std::int64_t>(room - num_prompt, 40));
    live_[sequence->id] = {.sequence = sequence, .kv_len = 0, .num_emitted = 0};
    scheduler_.enqueue(sequence);
    return 4 + 2 * (num_prompt + sequence->max_tokens);
  }

  void cancel_some() {
    if (!live_.empty() && draw(0, 9) == 0) {
      auto victim = live_.begin();
      std::advance(victim, draw(0, static_cast<std::int64_t>(live_.size()) - 1));
      finish(victim->second.sequence);
    }
  }

  void finish(const SequencePtr& sequence) {
    scheduler_.finish(sequence);
    live_.erase(sequence->id);
  }

  void admit() {
    const auto waiting = scheduler_.waiting();
    const auto admitted = scheduler_.admit();
    for (const SequencePtr& sequence : admitted) {
      CHECK(sequence->stage == Stage::kPrefill);
      const std::int64_t needed =
          scheduler_.pages_needed(sequence->num_prompt_tokens() + sequence->max_tokens);
      CHECK(static_cast<std::int64_t>(sequence->pages.size()) == needed);
    }
    // Nothing holds pages or slots, so the oldest must have got in.
    CHECK(!scheduler_.running().empty() || scheduler_.waiting().empty());
    for (const SequencePtr& sequence : scheduler_.waiting()) {
      CHECK(sequence->num_passes <= config_.max_admission_passes);
    }
    std::set<std::int32_t> slots;
    std::set<std::int32_t> pages;
    std::int64_t num_pages = 0;
    for (const SequencePtr& sequence : scheduler_.running()) {
      CHECK(sequence->slot >= 0 && sequence->slot < config_.max_batch_size);
      CHECK(slots.insert(sequence->slot).second);
      pages.insert(sequence->pages.begin(), sequence->pages.end());
      num_pages += static_cast<std::int64_t>(sequence->pages.size());
    }
    CHECK(static_cast<std::int64_t>(pages.size()) == num_pages);
    CHECK(num_pages == scheduler_.num_pages_used());
    CHECK(static_cast<std::int64_t>(slots.size()) == scheduler_.num_slots_used());
  }

  void launch() {
    std::set<const Sequence*> must_run;
    for (const SequencePtr& sequence : scheduler_.running()) {
      if (sequence->stage == Stage::kDecode &&
          sequence->num_emitted + sequence->num_sampling_in_flight < sequence->max_tokens) {
        must_run.insert(sequence.get());
      }
    }
    std::vector<ScheduledStep> steps = scheduler_.plan();
    std::int64_t num_tokens = 0;
    for (const ScheduledStep& step : steps) {
      CHECK(!step.rows.empty());
      CHECK(step.rows.size() == step.plan.rows.size());
      std::int64_t num_logits = 0;
      for (std::size_t row = 0; row < step.rows.size(); ++row) {
        const StepRow& planned = step.plan.rows[row];
        CHECK(planned.num_tokens > 0);
        CHECK(planned.slot == step.rows[row]->slot);
        CHECK(step.rows[row]->stage != Stage::kFinished);
        num_tokens += planned.num_tokens;
        num_logits += !step.plan.prefill || planned.all_logits ? planned.num_tokens
                                                               : std::int64_t{planned.samples};
        if (step.plan.prefill) {
          check_chunk(*step.rows[row], planned);
        } else {
          must_run.erase(step.rows[row].get());
        }
      }
      CHECK(num_logits <= max_logits_);
    }
    CHECK(must_run.empty());
    CHECK(num_tokens <= config_.max_num_tokens);
    const bool launched = !steps.empty();
    CHECK(launched || !in_flight_.empty() || scheduler_.running().empty());
    if (launched) {
      in_flight_.push_back(std::move(steps));
    }
    const auto allowed = static_cast<std::size_t>(config_.max_rounds_in_flight - 1);
    while (in_flight_.size() > (launched ? allowed : 0)) {
      for (const ScheduledStep& step : in_flight_.front()) {
        read(step);
      }
      in_flight_.pop_front();
    }
  }

  void check_chunk(const Sequence& sequence, const StepRow& row) const {
    CHECK(row.num_tokens <= config_.max_prefill_chunk);
    const bool last = sequence.num_prefilled == sequence.num_prompt_tokens();
    CHECK(row.samples == last);
    CHECK(last || config_.max_prefill_chunk < kPrefillAlignment ||
          sequence.num_prefilled % kPrefillAlignment == 0);
  }

  /// What the device would have made of a step: at least one token of each row that still runs.
  void read(const ScheduledStep& step) {
    for (std::size_t row = 0; row < step.rows.size(); ++row) {
      const SequencePtr& sequence = step.rows[row];
      const auto found = live_.find(sequence->id);
      if (found == live_.end()) {
        continue;
      }
      Live& live = found->second;
      const std::int64_t written = live.kv_len + step.plan.rows[row].num_tokens;
      CHECK(written <= static_cast<std::int64_t>(sequence->pages.size()) * config_.kv_page_size);
      if (step.plan.prefill) {
        live.kv_len = written;
        CHECK(live.kv_len <= sequence->num_prompt_tokens());
      }
      if (!step.plan.rows[row].samples) {
        continue;
      }
      const std::int64_t left = sequence->max_tokens - live.num_emitted;
      CHECK(left > 0);
      const std::int64_t emitted =
          step.plan.prefill ? 1
                            : draw(1, std::min<std::int64_t>(left, step.plan.rows[row].num_tokens));
      live.kv_len += step.plan.prefill ? 0 : emitted;
      live.num_emitted += emitted;
      sequence->num_emitted = live.num_emitted;
      if (emitted == left || draw(0, 19) == 0) {
        finish(sequence);
      }
    }
    scheduler_.step_read(step);
  }

  struct Live {
    SequencePtr sequence;
    std::int64_t kv_len;
    std::int64_t num_emitted;
  };

  std::mt19937_64 random_;
  Vocabulary vocabulary_ = Vocabulary::from_tokens(std::vector<std::string>{"a"}, {});
  ExecutorConfig config_;
  std::int64_t num_pages_;
  std::int64_t max_logits_;
  Scheduler scheduler_;
  std::map<RequestId, Live> live_;
  std::deque<std::vector<ScheduledStep>> in_flight_;
};

}  // namespace
}  // namespace deltaflash

int main(int argc, char** argv) {
  const std::uint64_t num_cases = argc > 1 ? std::stoull(argv[1]) : 2000;
  const std::uint64_t seed = argc > 2 ? std::stoull(argv[2]) : std::random_device{}();
  std::cerr << "scheduler_properties: " << num_cases << " cases from seed " << seed << std::endl;
  for (std::uint64_t index = 0; index < num_cases; ++index) {
    std::cerr << (index % 100 == 0 ? "." : "") << std::flush;
    deltaflash::Case(seed + index).run();
  }
  std::cerr << "\n";
  return 0;
}
