#include "runtime/src/pace.h"

#include <algorithm>

namespace deltaflash {
namespace {

constexpr double kRate = 0.2;  // of the moving averages
// Below, the rounds of a small model would leave nothing to other work but its overhead; above, a
// large model's streams would stutter.
constexpr double kShortestSliceNs = 2e6;
constexpr double kLongestSliceNs = 40e6;
constexpr std::int64_t kMostTokens = 1 << 20;

void follow(double& average, double value) {
  average = average == 0 ? value : average + kRate * (value - average);
}

}  // namespace

void Pace::round_took(std::int64_t ns) { follow(round_ns_, static_cast<double>(ns)); }

void Pace::prefill_took(std::int64_t num_tokens, std::int64_t ns) {
  follow(prefill_token_ns_, static_cast<double>(ns) / static_cast<double>(num_tokens));
}

std::int64_t Pace::slice_ns() const {
  return static_cast<std::int64_t>(std::clamp(round_ns_, kShortestSliceNs, kLongestSliceNs));
}

std::int64_t Pace::prefill_tokens(std::int64_t alignment) const {
  if (prefill_token_ns_ == 0) {
    return alignment;
  }
  const double tokens = static_cast<double>(slice_ns()) / prefill_token_ns_;
  const auto whole = static_cast<std::int64_t>(std::min(tokens, static_cast<double>(kMostTokens)));
  return std::max(alignment, whole / alignment * alignment);
}

}  // namespace deltaflash
