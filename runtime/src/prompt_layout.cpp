#include "runtime/src/prompt_layout.h"

#include <algorithm>
#include <string>

#include "runtime/src/request_checks.h"

namespace deltaflash {
namespace {

std::vector<ImageSpan> find_runs(std::span<const std::int32_t> token_ids, std::int32_t id) {
  std::vector<ImageSpan> runs;
  const auto num_tokens = static_cast<std::int64_t>(token_ids.size());
  for (std::int64_t i = 0; i < num_tokens; ++i) {
    if (token_ids[static_cast<std::size_t>(i)] != id) {
      continue;
    }
    if (runs.empty() || runs.back().first_token + runs.back().num_tokens != i) {
      runs.push_back({.first_token = i, .num_tokens = 0});
    }
    ++runs.back().num_tokens;
  }
  return runs;
}

}  // namespace

PromptLayout lay_out_prompt(std::span<const std::int32_t> token_ids, std::span<const Image> images,
                            const VisionConfig& config) {
  PromptLayout layout{
      .images = find_runs(token_ids, config.image_token_id), .positions = {}, .rope_delta = 0};
  const std::string placeholder = "placeholders (id " + std::to_string(config.image_token_id) + ")";
  if (layout.images.size() != images.size()) {
    refuse("images", std::to_string(images.size()) + " pictures",
           "one for each of the " + std::to_string(layout.images.size()) + " runs of " +
               placeholder + " in input_token_ids");
  }
  const std::size_t num_tokens = token_ids.size();
  layout.positions.resize(3 * num_tokens);
  std::int32_t* const time = layout.positions.data();
  std::int32_t* const row = time + num_tokens;
  std::int32_t* const column = row + num_tokens;
  std::int32_t next = 0;  // position
  std::size_t token = 0;
  const auto add_text = [&](std::size_t end) {
    for (; token < end; ++token) {
      time[token] = row[token] = column[token] = next++;
    }
  };
  for (std::size_t i = 0; i < images.size(); ++i) {
    const auto height = static_cast<std::int32_t>(images[i].height / config.factor());
    const auto width = static_cast<std::int32_t>(images[i].width / config.factor());
    const ImageSpan& span = layout.images[i];
    if (span.num_tokens != std::int64_t{height} * width) {
      refuse("input_token_ids",
             std::to_string(span.num_tokens) + " " + placeholder + " from index " +
                 std::to_string(span.first_token),
             std::to_string(std::int64_t{height} * width) + " for images[" + std::to_string(i) +
                 "] of " + std::to_string(images[i].width) + " x " +
                 std::to_string(images[i].height) + " pixels");
    }
    add_text(static_cast<std::size_t>(span.first_token));
    for (std::int32_t y = 0; y < height; ++y) {
      for (std::int32_t x = 0; x < width; ++x, ++token) {
        time[token] = next;
        row[token] = next + y;
        column[token] = next + x;
      }
    }
    next += std::max(height, width);
  }
  add_text(num_tokens);
  layout.rope_delta = next - static_cast<std::int32_t>(num_tokens);
  return layout;
}

}  // namespace deltaflash
