#include "runtime/src/response_queue.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace deltaflash {
namespace {

void append(LogitRows& rows, LogitRows&& more) {
  rows.num_rows += more.num_rows;
  rows.values.insert(rows.values.end(), more.values.begin(), more.values.end());
}

/// Makes `earlier` what a reader would know after reading both.
void merge(Response& earlier, Response&& later) {
  later.text.insert(0, earlier.text);
  later.token_ids.insert(later.token_ids.begin(), earlier.token_ids.begin(),
                         earlier.token_ids.end());
  append(earlier.context_logits, std::move(later.context_logits));
  append(earlier.generation_logits, std::move(later.generation_logits));
  later.context_logits = std::move(earlier.context_logits);
  later.generation_logits = std::move(earlier.generation_logits);
  earlier = std::move(later);
}

}  // namespace

ResponseQueue::ResponseQueue() : descriptor_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (descriptor_ < 0) {
    throw std::system_error(errno, std::generic_category(), "eventfd");
  }
}

ResponseQueue::~ResponseQueue() { ::close(descriptor_); }

void ResponseQueue::push(Response response) {
  const std::lock_guard lock(mutex_);
  const auto [entry, fresh] = index_.try_emplace(response.request_id, responses_.size());
  if (fresh) {
    responses_.push_back(std::move(response));
  } else {
    merge(responses_[entry->second], std::move(response));
  }
}

void ResponseQueue::publish() {
  const std::lock_guard lock(mutex_);
  if (responses_.empty() || signalled_) {
    return;
  }
  signalled_ = true;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(descriptor_, &one, sizeof one);
  ready_.notify_all();
}

std::vector<Response> ResponseQueue::take_locked() {
  if (signalled_) {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto read = ::read(descriptor_, &count, sizeof count);
    signalled_ = false;
  }
  index_.clear();
  return std::exchange(responses_, {});
}

std::vector<Response> ResponseQueue::take() {
  const std::lock_guard lock(mutex_);
  return take_locked();
}

std::vector<Response> ResponseQueue::await(std::optional<std::chrono::nanoseconds> timeout) {
  std::unique_lock lock(mutex_);
  const auto published = [this] { return signalled_ || closed_; };
  if (timeout) {
    ready_.wait_for(lock, *timeout, published);
  } else {
    ready_.wait(lock, published);
  }
  return take_locked();
}

void ResponseQueue::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  ready_.notify_all();
}

std::size_t ResponseQueue::num_ready() const {
  const std::lock_guard lock(mutex_);
  return responses_.size();
}

}  // namespace deltaflash
