#pragma once

#include <cstdint>
#include <functional>

#include "plugins/common/patch_grid.h"
#include "plugins/common/vision_kv.h"
#include "runtime/src/operators.h"
#include "runtime/src/program.h"

namespace deltaflash {

/// The rows that a stage of the vision step works on, and the picture they belong to.
struct VisionTile {
  const std::uint8_t* pixels;  // [grid.height * patch_size, grid.width * patch_size, 3]
  const float* levels;         // [3, 256]
  const float* angles;         // vision_rotary_angles of at least the picture's longer side
  VisionKv kv;                 // of the picture
  float* embeddings;           // [num_patches / merged, hidden size of the text], the result
  PatchGrid grid;
  std::int64_t first_row;  // a multiple of VisionConfig::merged(), as num_rows is
  std::int64_t num_rows;
};

using VisionOperator = std::function<void(const VisionTile&, Stream)>;

/// Whether a device has every op of the vision step.
bool has_vision_ops(const PluginTable& plugins);

/// As `bind_operator`, for an op of the vision step.
VisionOperator bind_vision_operator(const OpSpec& op, const ModelMemory& memory,
                                    const VisionConfig& config, const PluginTable& plugins);

}  // namespace deltaflash
