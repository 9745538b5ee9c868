#include "plugins/common/thread_pool.h"

#include <thread>

namespace deltaflash {
namespace {

// A pause is 40 to 140 cycles, so that a waiting thread gives its core up after some 50 us: longer
// than the gap between two ops of a step, shorter than what an idle server would notice.
constexpr int kSpins = 1000;

constexpr std::uint64_t kPartsLeftMask = 0xffffffffu;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// Delegates, so that the destructor joins the threads there are when the system refuses one more.
ThreadPool::ThreadPool(int num_threads) : ThreadPool() {
  workers_.reserve(num_threads > 1 ? static_cast<std::size_t>(num_threads) - 1 : 0);
  for (int i = 1; i < num_threads; ++i) {
    workers_.emplace_back([this] { work(); });
  }
}

ThreadPool::~ThreadPool() {
  stopping_.store(true, std::memory_order_relaxed);
  publish(0, nullptr, nullptr);
  for (std::thread& worker : workers_) {
    worker.join();
  }
}

void ThreadPool::publish(std::int64_t num_parts, Call call, const void* body) {
  call_.store(call, std::memory_order_relaxed);
  body_.store(body, std::memory_order_relaxed);
  num_parts_.store(static_cast<std::uint64_t>(num_parts), std::memory_order_relaxed);
  num_unfinished_.store(num_parts, std::memory_order_relaxed);
  // Sequentially consistent together with the worker's num_sleeping_ and its look at ticket_: one
  // of the two sees the other, so that no worker goes to sleep on work that is there.
  const std::uint64_t run = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  ticket_.store(run << 32 | static_cast<std::uint64_t>(num_parts), std::memory_order_seq_cst);
  if (num_sleeping_.load(std::memory_order_seq_cst) > 0) {
    {
      const std::lock_guard lock(mutex_);
    }
    start_.notify_all();
  }
}

void ThreadPool::run_parts(std::int64_t num_parts, Call call, const void* body) {
  if (num_parts <= 0) {
    return;
  }
  publish(num_parts, call, body);
  drain();
  std::int64_t unfinished = num_unfinished_.load(std::memory_order_acquire);
  for (int spin = 0; unfinished != 0 && spin < kSpins; ++spin) {
    pause();
    unfinished = num_unfinished_.load(std::memory_order_acquire);
  }
  while (unfinished != 0) {
    num_unfinished_.wait(unfinished, std::memory_order_acquire);
    unfinished = num_unfinished_.load(std::memory_order_acquire);
  }
}

void ThreadPool::drain() {
  std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while ((ticket & kPartsLeftMask) != 0) {
    if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel,
                                       std::memory_order_acquire)) {
      continue;
    }
    // The claimed part keeps the run from ending, and so the caller from changing these.
    const std::uint64_t num_parts = num_parts_.load(std::memory_order_relaxed);
    call_.load(std::memory_order_relaxed)(
        body_.load(std::memory_order_relaxed),
        static_cast<std::int64_t>(num_parts - (ticket & kPartsLeftMask)));
    if (num_unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      num_unfinished_.notify_one();
    }
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void ThreadPool::work() {
  std::uint64_t seen = 0;
  while (!stopping_.load(std::memory_order_relaxed)) {
    drain();
    std::uint64_t run = ticket_.load(std::memory_order_acquire) >> 32;
    for (int spin = 0; run == seen && spin < kSpins; ++spin) {
      pause();
      run = ticket_.load(std::memory_order_acquire) >> 32;
    }
    if (run == seen) {
      std::unique_lock lock(mutex_);
      num_sleeping_.fetch_add(1, std::memory_order_seq_cst);
      start_.wait(lock, [&] {
        run = ticket_.load(std::memory_order_seq_cst) >> 32;
        return run != seen;
      });
      num_sleeping_.fetch_sub(1, std::memory_order_relaxed);
    }
    seen = run;
  }
}

}  // namespace deltaflash
