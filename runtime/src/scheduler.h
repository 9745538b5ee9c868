#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <vector>

#include "runtime/src/model_runner.h"
#include "runtime/src/page_allocator.h"
#include "runtime/src/sequence.h"
#include "runtime/src/types.h"

namespace deltaflash {

/// GDN chunks are aligned to multiples of this many tokens of a sequence. Prompts are cut there
/// too, so that a prompt's result does not depend on who it shared the token budget with.
constexpr std::int64_t kPrefillAlignment = 64;

/// A planned step and whose rows it holds, in order.
struct ScheduledStep {
  StepPlan plan;
  std::vector<std::shared_ptr<Sequence>> rows;
};

/// Decides who runs: admission with guaranteed no eviction, chunked prefill under a token budget,
/// in-flight batching of verify rounds. Pure bookkeeping; one thread uses it.
class Scheduler {
 public:
  Scheduler(const ExecutorConfig& config, std::int64_t num_pages, std::int64_t max_logits);

  void enqueue(std::shared_ptr<Sequence> sequence);

  /// Gives slots and pages to waiting sequences, first come first served; one that does not fit is
  /// passed at most max_admission_passes times. Pages cover prompt, max_tokens and two verify rows.
  std::vector<std::shared_ptr<Sequence>> admit();

  /// The steps of an iteration, in the order in which to launch them; none is empty. Together they
  /// have at most max_num_tokens tokens: one verify row for every decoding sequence that may still
  /// emit, and with what that leaves, but no more than `max_prefill_tokens`, the next prompt
  /// chunks, oldest sequence first. A prompt goes as far as its pictures are encoded.
  std::vector<ScheduledStep> plan(
      std::int64_t max_prefill_tokens = std::numeric_limits<std::int64_t>::max());

  /// Whether a step of `plan` would have verify rows, or rows of prompts.
  bool has_verify() const;
  bool has_prefill() const;

  /// Removes a waiting sequence or marks a running one finished. Slot and pages of a running one
  /// come back once no launched step holds it: `step_read` sees to that.
  void finish(const std::shared_ptr<Sequence>& sequence);

  /// Counts a launched step as read for each of its rows.
  void step_read(const ScheduledStep& step);

  std::int64_t pages_needed(std::int64_t num_tokens) const;
  const std::deque<std::shared_ptr<Sequence>>& waiting() const { return waiting_; }
  const std::vector<std::shared_ptr<Sequence>>& running() const { return running_; }
  std::int64_t num_pages_used() const { return pages_.num_pages() - pages_.num_free(); }
  std::int64_t num_pages() const { return pages_.num_pages(); }
  std::int64_t num_slots_used() const;

 private:
  std::int64_t verify_len(const Sequence& sequence) const;
  bool takes_part(const Sequence& sequence) const;
  std::int64_t num_available(const Sequence& sequence) const;
  ScheduledStep plan_prefill(std::int64_t budget);
  ScheduledStep plan_verify();
  void release(Sequence& sequence);

  ExecutorConfig config_;
  std::int64_t max_logits_;
  PageAllocator pages_;
  std::vector<std::int32_t> free_slots_;
  std::deque<std::shared_ptr<Sequence>> waiting_;
  std::vector<std::shared_ptr<Sequence>> running_;  // in order of admission; finished ones too
};

}  // namespace deltaflash
