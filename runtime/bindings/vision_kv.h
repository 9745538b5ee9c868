#pragma once

#include <cstdint>
#include <string>

#include "plugins/common/vision_kv.h"
#include "runtime/bindings/array.h"

namespace deltaflash {

/// Keys [num_heads, num_tiles, head_dim, 64] and values [num_heads, num_tiles * 64, head_dim
/// rounded up to 16] of a picture of `num_patches`. Throws std::invalid_argument for other shapes.
template <typename T>
VisionKv vision_kv(const char* op, const Array<T, 4>& keys, const Array<T, 3>& values,
                   std::int64_t num_patches) {
  // Attention only reads them; the struct is shared with the op that writes them.
  const VisionKv kv{.keys = const_cast<float*>(keys.data()),
                    .values = const_cast<float*>(values.data()),
                    .num_patches = num_patches,
                    .num_heads = static_cast<std::int64_t>(keys.shape(0)),
                    .head_dim = static_cast<std::int64_t>(keys.shape(2))};
  check_argument(num_patches > 0, op,
                 "expected num_patches > 0, found " + std::to_string(num_patches));
  check_shape(op, "keys", keys, {kAnySize, kv.num_tiles(), kAnySize, VisionKv::kTile});
  check_shape(op, "values", values,
              {kv.num_heads, kv.num_tiles() * VisionKv::kTile, kv.value_stride()});
  return kv;
}

}  // namespace deltaflash
