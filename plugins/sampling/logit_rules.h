#pragma once

#include <cstdint>

#include "plugins/common/slot_table.h"

namespace deltaflash {

/// An entry of a slot's token counts: bit 15 says that the token stands in the prompt, the other
/// bits how often in the output, up to kMaxTokenCount.
constexpr std::uint16_t kTokenInPrompt = 0x8000;
constexpr std::int32_t kMaxTokenCount = 0x7FFF;

/// The entry after the token was emitted once more.
constexpr std::uint16_t counted_once_more(std::uint16_t entry) {
  return (entry & kMaxTokenCount) == kMaxTokenCount ? entry : static_cast<std::uint16_t>(entry + 1);
}

/// Whether a slot's logits depend on its token counts.
constexpr bool has_penalties(const SlotState& state) {
  return state.repetition_penalty > 0.0F || state.presence_penalty != 0.0F ||
         state.frequency_penalty != 0.0F;
}

/// Whether a slot's logits are changed before they are sampled.
constexpr bool has_rules(const SlotState& state) {
  return has_penalties(state) || state.num_biases > 0 || state.min_tokens > 0;
}

/// A logit under the penalties and the bias of its slot:
///   count = the output's in `entry` + num_drafted, at most kMaxTokenCount
///   l = logit; with a repetition penalty p, if the token is in the prompt or count > 0:
///       l > 0 ? l / p : l * p
///   l - (frequency_penalty * count + (count > 0 ? presence_penalty : 0)) + bias
/// In double, rounded once at the end. Both products are exact there, so the bits are the same
/// whether or not a compiler fuses them.
constexpr float ruled_logit(const SlotState& state, float logit, std::uint16_t entry,
                            std::int32_t num_drafted, float bias) {
  std::int32_t count = (entry & kMaxTokenCount) + num_drafted;
  count = count < kMaxTokenCount ? count : kMaxTokenCount;
  double l = logit;
  if (state.repetition_penalty > 0.0F && (count > 0 || (entry & kTokenInPrompt) != 0)) {
    const double penalty = state.repetition_penalty;
    l = l > 0.0 ? l / penalty : l * penalty;
  }
  const double presence = count > 0 ? state.presence_penalty : 0.0F;
  l -= static_cast<double>(state.frequency_penalty) * count + presence;
  return static_cast<float>(l + static_cast<double>(bias));
}

}  // namespace deltaflash
