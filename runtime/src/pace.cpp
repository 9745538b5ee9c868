#include "runtime/src/pace.h"

#include <algorithm>

namespace deltaflash {
namespace {

// Rates of the moving averages. Down is quick: what is late was disturbed or ran cold.
constexpr double kRateUp = 0.2;
constexpr double kRateDown = 0.5;
constexpr double kMostRounds = 8;  // that a slice may take to fit a piece of a prompt
// Below, the rounds of a small model would leave nothing to other work but its overhead; above, a
// large model's streams would stutter.
constexpr double kShortestSliceNs = 2e6;
constexpr double kLongestSliceNs = 40e6;
constexpr std::int64_t kMostTokens = 1 << 20;

void follow(double& average, double value) {
  const double rate = value > average ? kRateUp : kRateDown;
  average = average == 0 ? value : average + rate * (value - average);
}

}  // namespace

void Pace::round_took(std::int64_t ns) { follow(round_ns_, static_cast<double>(ns)); }

void Pace::prefill_took(std::int64_t num_tokens, std::int64_t ns) {
  // A short prompt takes longer a token, but no longer than a whole piece.
  follow(prefill_token_ns_,
         static_cast<double>(ns) / static_cast<double>(std::max(num_tokens, alignment_)));
}

std::int64_t Pace::slice_ns() const {
  const double piece_ns =
      std::min(prefill_token_ns_ * static_cast<double>(alignment_), kMostRounds * round_ns_);
  return static_cast<std::int64_t>(
      std::clamp(std::max(round_ns_, piece_ns), kShortestSliceNs, kLongestSliceNs));
}

std::int64_t Pace::prefill_tokens() const {
  if (prefill_token_ns_ == 0) {
    return alignment_;
  }
  const double tokens = static_cast<double>(slice_ns()) / prefill_token_ns_;
  const auto whole = static_cast<std::int64_t>(std::min(tokens, static_cast<double>(kMostTokens)));
  return std::max(alignment_, whole / alignment_ * alignment_);
}

}  // namespace deltaflash
