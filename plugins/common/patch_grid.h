#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

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

  /// Throws std::invalid_argument, naming `op`, unless the grid is made of whole merge blocks and
  /// rows [first_row, first_row + num_rows) lie inside of it.
  void check(const char* op, std::int64_t first_row, std::int64_t num_rows) const {
    if (merge_size <= 0 || height <= 0 || width <= 0 || height % merge_size != 0 ||
        width % merge_size != 0) {
      throw std::invalid_argument(std::string(op) + ": expected a grid of whole blocks of " +
                                  std::to_string(merge_size) + " x " + std::to_string(merge_size) +
                                  " patches, got " + std::to_string(height) + " x " +
                                  std::to_string(width));
    }
    if (first_row < 0 || num_rows < 0 || num_rows > num_patches() ||
        first_row > num_patches() - num_rows) {
      throw std::invalid_argument(std::string(op) + ": expected rows inside the " +
                                  std::to_string(num_patches()) + " of the picture, got " +
                                  std::to_string(num_rows) + " from " + std::to_string(first_row) +
                                  " on");
    }
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
