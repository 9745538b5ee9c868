#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace deltaflash {

/// A resized picture. Copies share the pixels.
struct Image {
  std::int64_t height = 0;  // pixels, a multiple of VisionConfig::factor(), as the width is
  std::int64_t width = 0;
  std::shared_ptr<const std::vector<std::uint8_t>> pixels;  // [height, width, 3], RGB
  std::string digest;  // of the pixels, for the encoder cache; empty = not cached
};

/// What the vision encoder made of a picture: what stands in for its placeholders' embeddings.
struct ImageEmbeddings {
  std::unique_ptr<float[]> values;  // [num_tokens, width]
  std::int64_t num_tokens = 0;
  std::int64_t width = 0;

  std::size_t num_bytes() const {
    return static_cast<std::size_t>(num_tokens * width) * sizeof(float);
  }
};

}  // namespace deltaflash
