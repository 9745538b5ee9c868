#include "runtime/src/response_queue.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <iterator>
#include <system_error>
#include <utility>

namespace deltaflash {
namespace {

/// Makes `earlier` what a reader would know after reading both. Linear in `later`: a slow reader's
/// responses are merged once a step. Logits come with the final response, so only `later` has any.
void merge(Response& earlier, Response&& later) {
  earlier.text += later.text;
  earlier.token_ids.insert(earlier.token_ids.end(), later.token_ids.begin(), later.token_ids.end());
  earlier.records.insert(earlier.records.end(), std::make_move_iterator(later.records.begin()),
                         std::make_move_iterator(later.records.end()));
  later.text = std::move(earlier.text);
  later.token_ids = std::move(earlier.token_ids);
  later.records = std::move(earlier.records);
  if (!later.progress) {
    later.progress = earlier.progress;
  }
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
