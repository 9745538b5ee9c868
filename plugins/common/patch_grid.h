#pragma once

#include <cstdint>

namespace deltaflash {

/// The patches of one picture. Rows of vision buffers follow merge blocks: blocks of merge_size x
/// merge_size patches in raster order, and inside a block its patches in raster order.
struct PatchGrid {
  std::int64_t height;  // in patches, a multiple of merge_size
  std::int64_t width;   // in patches, a multiple of merge_size
  std::int64_t merge_size;

  struct Place {
    std::int64_t row;
    std::int64_t column;
  };

  constexpr std::int64_t num_patches() const { return height * width; }

  constexpr bool valid() const {
    return merge_size > 0 && height > 0 && width > 0 && height % merge_size == 0 &&
           width % merge_size == 0;
  }

  /// Whether rows [first_row, first_row + num_rows) lie inside the picture.
  constexpr bool holds(std::int64_t first_row, std::int64_t num_rows) const {
    return first_row >= 0 && num_rows >= 0 && num_rows <= num_patches() &&
           first_row <= num_patches() - num_rows;
  }

  /// Where the patch of a row lies in the picture.
  constexpr Place place(std::int64_t patch) const {
    const std::int64_t block = patch / (merge_size * merge_size);
    const std::int64_t inside = patch % (merge_size * merge_size);
    const std::int64_t blocks_across = width / merge_size;
    return {.row = block / blocks_across * merge_size + inside / merge_size,
            .column = block % blocks_across * merge_size + inside % merge_size};
  }
};

}  // namespace deltaflash
