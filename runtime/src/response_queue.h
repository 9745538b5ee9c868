#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "runtime/src/types.h"

namespace deltaflash {

/// Responses on their way out of the loop thread. What nobody has taken yet is merged per request,
/// so the queue holds at most one entry for a live request however slow its reader is.
class ResponseQueue {
 public:
  ResponseQueue();
  ~ResponseQueue();
  ResponseQueue(const ResponseQueue&) = delete;
  ResponseQueue& operator=(const ResponseQueue&) = delete;

  /// Adds a response; nobody is woken before `publish`.
  void push(Response response);

  /// Wakes the readers once for all that was pushed since they last took something.
  void publish();

  /// Everything published or pushed so far, oldest request first; clears the descriptor.
  std::vector<Response> take();

  /// Waits until `take` would return something or `timeout` is over (absent: without end).
  std::vector<Response> await(std::optional<std::chrono::nanoseconds> timeout);

  /// No response comes any more: `await` returns at once from now on.
  void close();

  std::size_t num_ready() const;

  /// An eventfd that becomes readable at `publish` and is cleared by `take`.
  int descriptor() const { return descriptor_; }

 private:
  std::vector<Response> take_locked();

  mutable std::mutex mutex_;
  std::condition_variable ready_;
  std::vector<Response> responses_;
  std::unordered_map<RequestId, std::size_t> index_;
  bool signalled_ = false;
  bool closed_ = false;
  int descriptor_ = -1;
};

}  // namespace deltaflash
