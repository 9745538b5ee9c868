#pragma once

#include <cstdint>

#include "plugins/common/dtype.h"
#include "plugins/common/patch_grid.h"
#include "plugins/common/stream.h"

namespace deltaflash {

/// Adds bias and learned position to the rows of a patch embedding, in place:
///   x[n] += bias + table at (row * (side - 1) / (grid.height - 1), column * .. / (grid.width - 1))
/// with (row, column) the place of patch first_row + n: the square table is interpolated
/// bilinearly, its end points on those of the picture. A grid of one row or column reads 0 there.
///
/// Places are exact fractions, the four weights and all sums fp32: the error is within
/// 8 * 2^-24 * (|x| + |bias| + largest |table| read).
struct VisionPositionEmbedding {
  float* x;               // [num_rows, dim], read and written
  const float* bias;      // [dim], of the patch embedding; may be null
  const BFloat16* table;  // [side * side, dim], rows of the table first
  PatchGrid grid;
  std::int64_t side;
  std::int64_t dim;
  std::int64_t first_row;  // patch of x's first row
  std::int64_t num_rows;
};

namespace cpu {
/// Throws std::invalid_argument for a side or dim <= 0, a grid that is no multiple of its
/// merge_size or rows outside of it.
void vision_position_embedding(const VisionPositionEmbedding& args, Stream stream);
}  // namespace cpu
}  // namespace deltaflash
