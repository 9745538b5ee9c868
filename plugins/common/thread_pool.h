#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "plugins/common/stream.h"

namespace deltaflash {

/// The threads of one CPU stream. One caller at a time; `run` returns when every part is done.
class ThreadPool {
 public:
  /// `num_threads` counts the calling thread too, >= 1.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  /// Calls `part(index)` once for each index in [0, num_parts) on some thread of the pool.
  /// Parts must not throw.
  void run(std::int64_t num_parts, const std::function<void(std::int64_t)>& part);

 private:
  void work();
  void drain();

  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable done_;
  const std::function<void(std::int64_t)>* part_ = nullptr;
  std::int64_t num_parts_ = 0;
  std::int64_t next_part_ = 0;
  std::int64_t num_unfinished_ = 0;
  std::uint64_t generation_ = 0;
  bool stopping_ = false;
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
      pool == nullptr ? 1 : std::min<std::int64_t>(most, 4 * static_cast<std::int64_t>(pool->num_threads()));
  if (parts <= 1 || pool->num_threads() == 1) {
    body(std::int64_t{0}, count);
    return;
  }
  pool->run(parts, [&](std::int64_t part) {
    body(count * part / parts, count * (part + 1) / parts);
  });
}

}  // namespace deltaflash
