#pragma once

#include <cstdint>

namespace deltaflash {

/// Keys and values of one picture in one vision block, in the layout of `vision_attention`: made by
/// `vision_rotary`, written over by the next block. Patches are padded to whole tiles with zeros.
struct VisionKv {
  static constexpr std::int64_t kTile = 64;  // patches
  static constexpr std::int64_t kPad = 16;   // a value row is a whole number of these, in floats

  float* keys;    // [num_heads, num_tiles, head_dim, kTile]
  float* values;  // [num_heads, num_tiles * kTile, value_stride]
  std::int64_t num_patches;
  std::int64_t num_heads;
  std::int64_t head_dim;

  constexpr std::int64_t num_tiles() const { return (num_patches + kTile - 1) / kTile; }
  constexpr std::int64_t value_stride() const { return (head_dim + kPad - 1) / kPad * kPad; }

  /// Sizes of the two arrays in floats: num_heads * (num_patches rounded up to kTile) * head_dim,
  /// or * value_stride (that is 80 where head_dim is 72).
  constexpr std::int64_t key_count() const { return num_heads * num_tiles() * kTile * head_dim; }
  constexpr std::int64_t value_count() const {
    return num_heads * num_tiles() * kTile * value_stride();
  }
};

}  // namespace deltaflash
