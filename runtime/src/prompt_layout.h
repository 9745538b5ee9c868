#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/src/image.h"
#include "runtime/src/program.h"

namespace deltaflash {

/// A picture's placeholders in a prompt.
struct ImageSpan {
  std::int64_t first_token;
  std::int64_t num_tokens;
};

/// What pictures make of a prompt.
struct PromptLayout {
  std::vector<ImageSpan> images;        // in the order of the prompt
  std::vector<std::int32_t> positions;  // [3, num_tokens]: time, row, column
  std::int32_t rope_delta = 0;          // a token behind the prompt has position index + rope_delta
};

/// Finds the pictures' placeholders and counts rotary positions: text moves all three axes by one,
/// a picture's tokens take their row and column from where it began, and the text behind it goes on
/// after its longer side.
/// Throws std::invalid_argument unless the prompt has one run of placeholders for each picture, as
/// long as its tokens.
PromptLayout lay_out_prompt(std::span<const std::int32_t> token_ids, std::span<const Image> images,
                            const VisionConfig& config);

}  // namespace deltaflash
