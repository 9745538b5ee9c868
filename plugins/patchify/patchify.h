#pragma once

#include <cstdint>

#include "plugins/common/patch_grid.h"
#include "plugins/common/stream.h"

namespace deltaflash {

/// Cuts a picture into normalised patches, one a row in the order of `PatchGrid`:
///   out[n, c, f, y, x] = levels[c, pixels[(row * patch_size + y), (column * patch_size + x), c]]
/// with (row, column) the place of patch first_row + n and the same values in every frame f: a
/// still picture fills the frames of a video patch. Normalisation is the caller's table, so the
/// numbers are exactly those of the processor that made it.
struct Patchify {
  const std::uint8_t* pixels;  // [grid.height * patch_size, grid.width * patch_size, 3], RGB
  const float* levels;         // [3, 256]: what a channel's value becomes
  float* out;                  // [num_rows, 3, num_frames, patch_size, patch_size]
  PatchGrid grid;
  std::int64_t patch_size;
  std::int64_t num_frames;  // temporal_patch_size of the model
  std::int64_t first_row;   // patch of out's first row
  std::int64_t num_rows;
};

namespace cpu {
/// Exact. Throws std::invalid_argument for a size <= 0, a grid that is no multiple of its
/// merge_size or rows outside of it.
void patchify(const Patchify& args, Stream stream);
}  // namespace cpu
}  // namespace deltaflash
