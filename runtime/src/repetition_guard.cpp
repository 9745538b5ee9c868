#include "runtime/src/repetition_guard.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace deltaflash {
namespace {

void check_range(const char* field, std::int32_t value, std::int32_t least, std::int32_t most) {
  if (value < least || value > most) {
    throw std::invalid_argument("repetition_guard." + std::string(field) + ": " +
                                std::to_string(value) + ", expected " + std::to_string(least) +
                                " to " + std::to_string(most));
  }
}

}  // namespace

RepetitionGuard::RepetitionGuard(const RepetitionLimits& limits, std::int64_t min_tokens)
    : min_tokens_(min_tokens) {
  check_range("max_period", limits.max_period, 1, 512);
  check_range("min_repeats", limits.min_repeats, 2, 1024);
  check_range("min_repeated_tokens", limits.min_repeated_tokens, 0, 65536);
  const auto size = static_cast<std::size_t>(limits.max_period);
  recent_.assign(2 * size, -1);
  num_equal_.assign(size, 0);
  for (std::int32_t period = limits.max_period; period > 0; --period) {
    // The first period of a run has nothing before it to be equal to.
    limit_.push_back(std::max(period * limits.min_repeats, limits.min_repeated_tokens) - period);
  }
}

bool RepetitionGuard::push(std::int32_t token_id) {
  const std::size_t size = num_equal_.size();
  const std::int32_t* before = recent_.data() + oldest_;
  std::int32_t found = 0;
  for (std::size_t i = 0; i < size; ++i) {
    const std::int32_t equal = before[i] == token_id ? num_equal_[i] + 1 : 0;
    num_equal_[i] = equal;
    found |= static_cast<std::int32_t>(equal >= limit_[i]);
  }
  recent_[oldest_] = token_id;
  recent_[oldest_ + size] = token_id;
  if (++oldest_ == size) {
    oldest_ = 0;
  }
  return ++num_tokens_ > min_tokens_ && found != 0;
}

}  // namespace deltaflash
