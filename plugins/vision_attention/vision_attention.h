#pragma once

#include <cstdint>

#include "plugins/common/stream.h"
#include "plugins/common/vision_kv.h"

namespace deltaflash {

/// Attention of patches over all patches of their picture, in both directions:
///   out[n, h] = sum_m softmax_m(scale * q[n, h] . key[m, h]) value[m, h]
/// `q` and `out` may be any rows of the picture: a row's bits depend neither on where the rows
/// begin and end nor on the number of threads. Rows are worked on in tiles of kQueryTile from the
/// first one on, so pieces that are a multiple of it cost least. `out` may be `q`. `kv` is read
/// quickest from a cache line border (64 bytes).
///
/// Online softmax over 128 patches at a time in fp32, memory 100 kB a thread whatever the picture's
/// size. Errors, with u = 2^-24: a score s is off by at most (head_dim + 4) u * sum |scale q k|,
/// its weight by that, by (|s| + 3) u relatively, and by num_patches / 128 rescalings of u each;
/// sums over patches add at most 2 (num_patches / 16 + 16) u, in practice their square root.
/// Weights below 2^-125 of the largest count as 2^-125 of it.
struct VisionAttention {
  static constexpr std::int64_t kQueryTile = 48;

  const float* q;  // [num_rows, num_heads, head_dim], rotated
  VisionKv kv;     // of the whole picture
  float* out;      // [num_rows, num_heads, head_dim]
  std::int64_t num_rows;
  float scale;  // head_dim^-0.5
};

namespace cpu {
/// Throws std::invalid_argument for a head_dim outside 16 .. 128 or no multiple of 4, no heads, no
/// patches or num_rows < 0.
void vision_attention(const VisionAttention& args, Stream stream);
}  // namespace cpu
}  // namespace deltaflash
