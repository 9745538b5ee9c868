#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "runtime/src/engine_info.h"
#include "runtime/src/model_runner.h"
#include "runtime/src/pace.h"
#include "runtime/src/response_queue.h"
#include "runtime/src/scheduler.h"
#include "runtime/src/types.h"
#include "runtime/src/vision_queue.h"
#include "runtime/src/vocabulary.h"

namespace deltaflash {

/// Generates tokens with one engine. Owns the loop thread; names follow the TensorRT-LLM Executor
/// API. Every method may be called from any thread.
class Executor {
 public:
  /// Loads an engine directory (already checked by `runtime.engine_directory`) on the CPU backend
  /// and starts the loop.
  /// Throws EngineError for an engine that does not fit itself or this runtime, and
  /// std::invalid_argument for a config that cannot work.
  Executor(const std::filesystem::path& engine_dir, ExecutorConfig config);

  /// As `shutdown`.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Queues a request and returns its id at once.
  /// Throws std::invalid_argument naming the field that is wrong, CapacityError when the queue is
  /// full, EngineLost after the loop ended.
  RequestId enqueue_request(Request request);

  /// Asks for the end of a request. Its final response (kCancelled) still comes; an unknown or
  /// finished id is harmless.
  void cancel_request(RequestId id);

  /// Responses that are ready, waiting for some if there are none. Empty on timeout and after the
  /// loop has ended.
  std::vector<Response> await_responses(std::optional<std::chrono::nanoseconds> timeout);
  std::vector<Response> take_responses();
  std::size_t num_responses_ready() const { return responses_.num_ready(); }

  /// Becomes readable once per step in which responses became ready; take_responses() clears it.
  int response_descriptor() const { return responses_.descriptor(); }

  /// Statistics of the iterations since the last call, at most iter_stats_max_iterations.
  std::vector<IterationStats> get_latest_iteration_stats();
  LoadReport load() const;

  bool can_enqueue_requests() const;

  /// What ended the loop, if an exception did.
  std::optional<std::string> engine_error() const;

  /// Cancels what runs, delivers the final responses and joins the loop. Idempotent.
  void shutdown();

  const EngineInfo& engine() const { return engine_; }
  const ExecutorConfig& config() const { return config_; }

 private:
  using SequencePtr = std::shared_ptr<Sequence>;

  SequencePtr make_sequence(Request request);
  std::int64_t pool_room(std::int64_t num_prompt_tokens) const;

  void run();
  void iterate();
  bool wait_for_work();
  void take_inbox();
  void end_overdue();
  void admit();
  bool launch(std::vector<ScheduledStep> steps);
  void encode(std::int64_t budget_ns);
  void prompt_launched(Sequence& sequence);
  void show_progress(const Sequence& sequence, ProgressPhase phase,
                     std::optional<double> fraction = {});
  void read_oldest();
  void take_row(const SequencePtr& sequence, const StepRow& row, std::size_t index,
                const StepResult& result, bool prefill);
  bool keeps_text(const Request& request, TokenId stop) const;
  void finish(const SequencePtr& sequence, FinishReason reason, Response response);
  void cancel_all();
  void end(const std::optional<std::string>& error);
  void report();

  ExecutorConfig config_;
  EngineInfo engine_;
  Vocabulary vocabulary_;
  std::unique_ptr<ModelRunner> runner_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<VisionQueue> vision_;  // null where pictures are refused; loop thread only
  Pace pace_;                            // loop thread only
  ResponseQueue responses_;
  // Launched iterations whose steps have not all been read, oldest first.
  std::deque<std::vector<ScheduledStep>> in_flight_;
  std::unordered_map<RequestId, SequencePtr> live_;  // loop thread only
  IterationStats current_;                           // loop thread only
  std::int64_t num_iterations_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::deque<SequencePtr> inbox_;
  std::vector<RequestId> cancels_;
  std::deque<IterationStats> stats_;
  LoadReport load_;  // as of the last iteration
  std::int64_t num_live_ = 0;
  std::int64_t num_waiting_tokens_ = 0;
  std::int64_t last_progress_ns_ = 0;
  std::int64_t oldest_arrival_ns_ = 0;
  RequestId last_id_ = 0;
  std::mt19937_64 seeds_;
  bool stopping_ = false;
  bool ended_ = false;
  std::optional<std::string> engine_error_;

  std::mutex join_mutex_;
  std::thread loop_;
};

}  // namespace deltaflash
