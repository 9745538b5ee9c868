#pragma once

#include <cstdint>

#include "plugins/common/patch_grid.h"
#include "plugins/common/stream.h"
#include "plugins/common/vision_kv.h"

namespace deltaflash {

/// Bias, 2-D rotary embedding and layout of a vision block's fused projection. A row of `qkv` is
/// [q | k | v] with num_heads heads of head_dim each, to which `bias` is added. q and k are then
/// rotated: with d4 = head_dim / 4, dim n < 2 * d4 pairs with n + 2 * d4 and turns by
///   angle(row, n) if n < d4, angle(column, n - d4) else;  angle(p, m) = p * theta^(-m / d4)
/// where (row, column) is the place of the patch. q goes to `q`, k and v to `kv` in the layout that
/// attention reads. The rows that hold the picture's last patch also zero what pads `kv`, so rows
/// may come in any pieces and order; attention needs them all.
///
/// fp32, from `angles`: an output is off by at most 3 * 2^-24 * (|a| + |b|) of its pair a, b.
struct VisionRotary {
  const float* qkv;     // [num_rows, 3, num_heads, head_dim]
  const float* bias;    // [3, num_heads, head_dim]
  const float* angles;  // [max(grid.height, grid.width), 2, head_dim / 4], vision_rotary_angles
  float* q;             // [num_rows, num_heads, head_dim]; not qkv
  VisionKv kv;          // of the whole picture, kv.num_patches == grid.num_patches()
  PatchGrid grid;
  std::int64_t first_row;  // patch of the first row of qkv and q
  std::int64_t num_rows;
};

/// Cosines and sines of the angles of positions 0 .. num_positions - 1: angles[p] holds head_dim /
/// 4 cosines, then the sines. Frequencies and angles are rounded to fp32 as the reference does it,
/// cosine and sine are those of the rounded angle. Throws std::invalid_argument unless head_dim is
/// a multiple of 4, num_positions >= 0 and theta > 0.
void vision_rotary_angles(std::int64_t num_positions, std::int64_t head_dim, float theta,
                          float* angles);

namespace cpu {
/// Throws std::invalid_argument for a head_dim that is no multiple of 4 or outside 16 .. 128, no
/// heads, a grid that is no multiple of its merge_size or of another size than kv, or rows outside
/// of it.
void vision_rotary(const VisionRotary& args, Stream stream);
}  // namespace cpu
}  // namespace deltaflash
