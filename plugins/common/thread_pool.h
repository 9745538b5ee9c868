#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "plugins/common/stream.h"

namespace deltaflash {

/// The threads of one CPU stream. One caller at a time; `run` returns when every part is done.
/// Threads take parts as they get free. Between two runs they spin for some 50 us, then sleep.
class ThreadPool {
 public:
  /// `num_threads` counts the calling thread too, >= 1. Throws std::system_error where the system
  /// has no more threads.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  /// Calls `part(index)` once for each index in [0, num_parts) on some thread of the pool.
  /// num_parts < 2^32. Parts must not throw, nor run the pool.
  template <typename Part>
  void run(std::int64_t num_parts, const Part& part) {
    run_parts(
        num_parts,
        [](const void* body, std::int64_t index) { (*static_cast<const Part*>(body))(index); },
        &part);
  }

 private:
  ThreadPool() = default;

  using Call = void (*)(const void* body, std::int64_t index);

  void run_parts(std::int64_t num_parts, Call call, const void* body);
  void publish(std::int64_t num_parts, Call call, const void* body);
  void drain();
  void work();

  // Upper half: which run this is; lower half: how many of its parts nobody has claimed. Both
  // change in one compare and swap, so a thread that is late cannot claim a part of another run.
  alignas(64) std::atomic<std::uint64_t> ticket_ = 0;
  std::atomic<Call> call_ = nullptr;
  std::atomic<const void*> body_ = nullptr;
  std::atomic<std::uint64_t> num_parts_ = 0;
  std::atomic<bool> stopping_ = false;
  alignas(64) std::atomic<std::int64_t> num_unfinished_ = 0;
  std::atomic<int> num_sleeping_ = 0;
  alignas(64) std::mutex mutex_;
  std::condition_variable start_;
  std::vector<std::thread> workers_;
};

/// Splits [0, count) over the pool of `stream` into ranges of at least `grain` and calls
/// `body(begin, end)` for each. What a range computes must not depend on where the ranges end:
/// that is what keeps results independent of the batch and of the number of threads.
template <typename Body>
void parallel_for(Stream stream, std::int64_t count, std::int64_t grain, const Body& body) {
  if (count <= 0) {
    return;
  }
  auto* pool = static_cast<ThreadPool*>(stream.handle);
  const std::int64_t most = (count + grain - 1) / grain;
  const std::int64_t parts =
      pool == nullptr
          ? 1
          : std::min<std::int64_t>(most, 4 * static_cast<std::int64_t>(pool->num_threads()));
  if (parts <= 1 || pool->num_threads() == 1) {
    body(std::int64_t{0}, count);
    return;
  }
  pool->run(parts,
            [&](std::int64_t part) { body(count * part / parts, count * (part + 1) / parts); });
}

}  // namespace deltaflash
