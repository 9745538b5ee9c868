/// Drives executors of random configs from many threads until the time is over: requests of all
/// kinds, cancels, reports, a reader or two, shutdown at a random moment, a loop that fails. Every
/// request must get exactly one final response, and an executor that has ended its requests must
/// hold nothing. What else is wrong is for a sanitizer to see.
///
///   executor_stress ENGINE_DIR [SECONDS [SEED]]     an engine of the tiny checkpoint
#include <atomic>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "plugins/common/error.h"
#include "runtime/src/executor.h"
#include "tests/native/check.h"

namespace deltaflash {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::int32_t kMaxScripted = 64;
constexpr std::int32_t kVocab = 480;       // ordinary ids of the tiny checkpoint
constexpr std::int32_t kImageToken = 500;  // of the tiny checkpoint
constexpr std::int32_t kTokenSide = 32;    // pixels
constexpr auto kPatience = std::chrono::seconds(60);

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::int32_t draw(std::int32_t least, std::int32_t most) {
    return std::uniform_int_distribution<std::int32_t>(least, most)(engine_);
  }
  bool one_in(std::int32_t count) { return draw(1, count) == 1; }

 private:
  std::mt19937_64 engine_;
};

ExecutorConfig random_config(Random& random) {
  ExecutorConfig config;
  config.max_batch_size = random.draw(1, 5);
  config.max_draft_tokens = random.one_in(2) ? random.draw(1, 7) : 0;
  config.max_prefill_chunk = random.one_in(2) ? 64 : random.draw(1, 130);
  config.max_num_tokens = config.max_batch_size * (config.max_draft_tokens + 1) +
                          std::min(64, config.max_prefill_chunk) + random.draw(0, 60);
  config.max_queue_size = random.draw(0, 30);
  config.kv_page_size = random.draw(1, 40);
  config.max_kv_tokens = random.draw(200, 1000);
  config.max_rounds_in_flight = random.draw(1, 2);
  config.num_threads = random.draw(1, 3);
  config.iter_stats_max_iterations = random.draw(0, 20);
  config.max_scripted_tokens = kMaxScripted;
  config.max_admission_passes = random.draw(0, 4);
  config.max_vision_tile = 16 * random.draw(1, 6);
  config.encoder_cache_bytes = random.one_in(2) ? random.draw(0, 20'000) : 0;
  return config;
}

/// Appends a picture of noise to a request, and its placeholders to the prompt.
void add_picture(Random& random, Request& request) {
  const std::int32_t rows = random.draw(1, 6);
  const std::int32_t columns = random.draw(1, 6);
  auto pixels = std::make_shared<std::vector<std::uint8_t>>();
  for (std::int32_t i = 0; i < 3 * rows * columns * kTokenSide * kTokenSide; ++i) {
    pixels->push_back(static_cast<std::uint8_t>(i * 7 + rows));
  }
  request.images.push_back({.height = rows * kTokenSide,
                            .width = columns * kTokenSide,
                            .pixels = std::move(pixels),
                            .digest = random.one_in(2) ? "" : std::string(1, 'a')});
  request.input_token_ids.insert(request.input_token_ids.end(),
                                 static_cast<std::size_t>(rows * columns), kImageToken);
  request.input_token_ids.push_back(random.draw(0, kVocab - 1));
}

Request random_request(Random& random) {
  Request request;
  const std::int32_t num_prompt = random.one_in(4) ? random.draw(1, 150) : random.draw(1, 20);
  for (std::int32_t i = 0; i < num_prompt; ++i) {
    request.input_token_ids.push_back(random.draw(0, kVocab - 1));
  }
  for (std::int32_t i = num_prompt <= 20 ? random.draw(-4, 2) : 0; i > 0; --i) {
    add_picture(random, request);
  }
  request.return_progress = random.one_in(3);
  request.max_tokens = random.draw(1, 30);
  request.ignore_end_ids = random.one_in(2);
  if (random.one_in(3)) {
    request.sampling.temperature = 0.8F;
    request.sampling.top_k = random.draw(0, 20);
    request.sampling.top_p = random.one_in(2) ? 1.0F : 0.9F;
  }
  if (random.one_in(3)) {
    request.stop_strings = {std::string(1, static_cast<char>(random.draw('a', 'z'))),
                            "\xef\xbf\xbd"};
    request.include_stop = random.one_in(2);
  }
  if (random.one_in(5)) {
    request.allotted_time_ms = random.draw(1, 20);
  }
  if (random.one_in(3)) {
    for (std::int32_t i = 0; i < random.draw(0, kMaxScripted); ++i) {
      request.forced_tokens.push_back(random.draw(0, kVocab - 1));
    }
    request.draft_script = {random.draw(0, 7), random.draw(0, 7)};
  }
  if (random.one_in(3)) {
    request.output.token_records = true;
    if (random.one_in(2)) {
      request.output.top_logprobs = random.draw(0, kMaxTopLogprobs);
    }
  }
  request.output.return_context_logits = random.one_in(8);
  request.output.return_generation_logits = random.one_in(8);
  return request;
}

/// One executor from its start to its end.
class Session {
 public:
  Session(const std::filesystem::path& engine_dir, std::uint64_t seed)
      : random_(seed),
        executor_(engine_dir, random_config(random_)),
        may_fail_(random_.one_in(4)) {}

  /// Returns how many requests it had.
  std::size_t run() {
    const std::int32_t shutdown_after_ms = random_.one_in(2) ? random_.draw(0, 60) : -1;
    std::vector<std::thread> callers;
    const std::int32_t num_callers = random_.draw(1, 3);
    for (std::int32_t i = 0; i < num_callers; ++i) {
      callers.emplace_back([this, seed = random_.draw(0, 1 << 30)] { call(seed); });
    }
    std::thread watcher([this] { watch(); });
    std::vector<std::thread> readers;
    const std::int32_t num_readers = random_.draw(1, 2);
    for (std::int32_t i = 0; i < num_readers; ++i) {
      readers.emplace_back([this, i] { read(i == 0); });
    }
    if (shutdown_after_ms >= 0) {
      std::this_thread::sleep_for(milliseconds(shutdown_after_ms));
      std::thread other([this] { executor_.shutdown(); });
      executor_.shutdown();
      other.join();
      CHECK(!executor_.can_enqueue_requests());
    }
    for (std::thread& caller : callers) {
      caller.join();
    }
    wait_for_ends();
    if (executor_.can_enqueue_requests()) {
      wait_until_idle();
    }
    ended_ = true;
    executor_.shutdown();
    for (std::thread& reader : readers) {
      reader.join();
    }
    watcher.join();
    check_ends();
    return ids_.size();
  }

  bool failed() const { return executor_.engine_error().has_value(); }

 private:
  struct Received {
    std::int64_t num_tokens = 0;
    std::int64_t num_finals = 0;
  };

  void call(std::uint64_t seed) {
    Random random(seed);
    std::vector<RequestId> mine;
    for (std::int32_t i = 0; i < 25; ++i) {
      try {
        Request request = random_request(random);
        request.fail_after_tokens = may_fail_ && random.one_in(20) ? random.draw(1, 10) : 0;
        const RequestId id = executor_.enqueue_request(std::move(request));
        mine.push_back(id);
        const std::lock_guard lock(mutex_);
        ids_.push_back(id);
      } catch (const CapacityError&) {
        std::this_thread::sleep_for(milliseconds(1));
      } catch (const EngineLost&) {
        return;
      }
      if (!mine.empty() && random.one_in(3)) {
        const std::int32_t which = random.draw(0, static_cast<std::int32_t>(mine.size()) - 1);
        executor_.cancel_request(mine[static_cast<std::size_t>(which)]);
      }
      if (random.one_in(20)) {
        executor_.cancel_request(1'000'000);
      }
      if (random.one_in(4)) {
        std::this_thread::sleep_for(std::chrono::microseconds(random.draw(0, 3000)));
      }
    }
  }

  void watch() {
    while (!ended_) {
      const LoadReport load = executor_.load();
      CHECK(load.num_queued >= 0 && load.num_queued_tokens >= 0);
      CHECK(load.slots_used >= 0 && load.slots_used <= load.slots_total);
      CHECK(load.pages_used >= 0 && load.pages_used <= load.pages_total);
      CHECK(load.silence_ns >= 0 && load.oldest_queued_ns >= 0);
      CHECK(executor_.get_latest_iteration_stats().size() <=
            static_cast<std::size_t>(executor_.config().iter_stats_max_iterations));
      CHECK(may_fail_ || !executor_.engine_error());
      static_cast<void>(executor_.num_responses_ready());
      std::this_thread::sleep_for(milliseconds(1));
    }
  }

  void read(bool waits) {
    // What an await took just before the end must not get lost either, so one more look at last.
    bool last = false;
    while (true) {
      const auto responses =
          waits ? executor_.await_responses(milliseconds(5)) : executor_.take_responses();
      {
        const std::lock_guard lock(mutex_);
        for (const Response& response : responses) {
          take(response);
        }
      }
      if (last) {
        return;
      }
      last = ended_;
      if (!waits || !executor_.can_enqueue_requests()) {
        std::this_thread::sleep_for(std::chrono::microseconds(500));
      }
    }
  }

  void take(const Response& response) {
    Received& received = received_[response.request_id];
    received.num_tokens += static_cast<std::int64_t>(response.token_ids.size());
    received.num_finals += static_cast<std::int64_t>(response.is_final);
    // Two readers may take the pieces of a request in either order.
    CHECK(received.num_finals <= 1);
    CHECK(response.is_final == (response.finish_reason != FinishReason::kNotFinished));
    CHECK(!response.error || (response.is_final && executor_.engine_error() == response.error));
    if (response.is_final) {
      // What the failing iteration brought is lost.
      num_completion_tokens_[response.request_id] =
          response.error ? received.num_tokens : response.num_completion_tokens;
      ++num_finals_;
    }
  }

  void wait_for_ends() {
    const auto deadline = Clock::now() + kPatience;
    while (true) {
      {
        const std::lock_guard lock(mutex_);
        if (num_finals_ == ids_.size()) {
          return;
        }
      }
      CHECK(Clock::now() < deadline);
      std::this_thread::sleep_for(milliseconds(1));
    }
  }

  void wait_until_idle() {
    const auto deadline = Clock::now() + kPatience;
    while (true) {
      const LoadReport load = executor_.load();
      if (load.num_running + load.num_queued + load.num_queued_tokens + load.slots_used +
              load.pages_used ==
          0) {
        return;
      }
      CHECK(Clock::now() < deadline);
      std::this_thread::sleep_for(milliseconds(1));
    }
  }

  void check_ends() {
    try {
      executor_.enqueue_request(random_request(random_));
      CHECK(false);
    } catch (const EngineLost& lost) {
      CHECK(lost.what() == executor_.engine_error().value_or("the executor has been shut down"));
    }
    CHECK(may_fail_ || !executor_.engine_error());
    CHECK(executor_.take_responses().empty());
    CHECK(received_.size() == ids_.size());
    for (const RequestId id : ids_) {
      CHECK(received_.at(id).num_finals == 1);
      CHECK(received_.at(id).num_tokens == num_completion_tokens_.at(id));
    }
    const LoadReport load = executor_.load();
    CHECK(load.num_running + load.num_queued + load.slots_used + load.pages_used == 0);
  }

  Random random_;
  Executor executor_;
  bool may_fail_;
  std::atomic<bool> ended_ = false;
  std::mutex mutex_;
  std::vector<RequestId> ids_;
  std::map<RequestId, Received> received_;
  std::map<RequestId, std::int64_t> num_completion_tokens_;
  std::size_t num_finals_ = 0;
};

}  // namespace
}  // namespace deltaflash

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: executor_stress ENGINE_DIR [SECONDS [SEED]]\n";
    return 2;
  }
  const auto end =
      deltaflash::Clock::now() + std::chrono::seconds(argc > 2 ? std::stoi(argv[2]) : 20);
  const std::uint64_t seed = argc > 3 ? std::stoull(argv[3]) : std::random_device{}();
  std::cerr << "executor_stress: from seed " << seed << std::endl;
  std::uint64_t num_sessions = 0;
  std::size_t num_requests = 0;
  std::size_t num_failures = 0;
  do {
    deltaflash::Session session(argv[1], seed + num_sessions++);
    num_requests += session.run();
    num_failures += static_cast<std::size_t>(session.failed());
  } while (deltaflash::Clock::now() < end);
  std::cerr << "executor_stress: " << num_sessions << " executors, " << num_requests
            << " requests, " << num_failures << " failures of the loop\n";
  return 0;
}
