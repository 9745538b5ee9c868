#include "runtime/src/vision_operators.h"

#include <array>
#include <cmath>

#include "runtime/src/op_binder.h"

namespace deltaflash {
namespace {

/// A buffer of the vision step: finds the rows of the tile at hand in it.
struct TileRows {
  float* data;  // null for the picture's result, which the tile brings along
  RowKind rows;
  std::int64_t width;
  std::int64_t merged;  // patches of a token

  float* in(const VisionTile& tile) const {
    switch (rows) {
      case RowKind::kPatches:
        return data + tile.first_row * width;
      case RowKind::kImageTokens:
        return tile.embeddings + tile.first_row / merged * width;
      default:
        return data;
    }
  }

  bool has_tokens() const {
    return rows == RowKind::kImageTokens || rows == RowKind::kImageTokenTile;
  }

  std::int64_t count(const VisionTile& tile) const {
    return has_tokens() ? tile.num_rows / merged : tile.num_rows;
  }
};

TileRows tile_rows(const OpBinder& bind, const VisionConfig& config, const std::string& key) {
  const Buffer& buffer = bind.any_buffer(key);
  if (buffer.spec.rows == RowKind::kTokens || buffer.spec.rows == RowKind::kLogits) {
    bind.fail("has rows of " + std::string(name_of(buffer.spec.rows)) + " in its buffer \"" + key +
              "\", expected a kind of the vision step");
  }
  return {static_cast<float*>(buffer.data), buffer.spec.rows, buffer.spec.width, config.merged()};
}

TileRows tile_rows(const OpBinder& bind, const VisionConfig& config, const std::string& key,
                   RowKind rows, std::int64_t width) {
  bind.buffer(key, width, rows);
  return tile_rows(bind, config, key);
}

VisionOperator bind_vision_segment(const OpSpec& op, const ModelMemory& memory,
                                   const VisionConfig& config) {
  const OpBinder bind(op, memory);
  const auto found = memory.segments.find(op.segment);
  if (found == memory.segments.end()) {
    bind.fail("is not among the program's segments");
  }
  const auto& [spec, run] = found->second;
  const TileRows x = tile_rows(bind, config, "x");
  const TileRows out = tile_rows(bind, config, "out");
  // The rows of a merge block, side by side, are one row of the merger.
  const std::int64_t side_by_side = out.has_tokens() && !x.has_tokens() ? config.merged() : 1;
  if (x.width * side_by_side != spec.in_dim || out.width != spec.out_dim ||
      (x.has_tokens() && !out.has_tokens())) {
    bind.fail("needs " + std::to_string(spec.in_dim) + " to " + std::to_string(spec.out_dim) +
              " columns, found " + std::to_string(x.width * side_by_side) + " to " +
              std::to_string(out.width));
  }
  return [x, out, segment = run.get()](const VisionTile& tile, Stream stream) {
    const std::array<const void*, 1> inputs{x.in(tile)};
    const std::array<void*, 1> outputs{out.in(tile)};
    segment->launch(stream, out.count(tile), inputs, outputs);
  };
}

VisionOperator bind_patchify(const OpBinder& bind, const VisionConfig& config,
                             const PluginTable& plugins) {
  const std::int64_t width = 3 * config.num_frames * config.patch_size * config.patch_size;
  const TileRows out = tile_rows(bind, config, "out", RowKind::kPatchTile, width);
  return [out, patch_size = config.patch_size, num_frames = config.num_frames,
          run = plugins.patchify](const VisionTile& tile, Stream stream) {
    run({.pixels = tile.pixels,
         .levels = tile.levels,
         .out = out.in(tile),
         .grid = tile.grid,
         .patch_size = patch_size,
         .num_frames = num_frames,
         .first_row = tile.first_row,
         .num_rows = tile.num_rows},
        stream);
  };
}

VisionOperator bind_position_embedding(const OpBinder& bind, const VisionConfig& config,
                                       const PluginTable& plugins) {
  const std::int64_t side = config.position_side;
  const std::int64_t dim = config.hidden_size;
  const TileRows x = tile_rows(bind, config, "x", RowKind::kPatches, dim);
  const auto* bias = bind.weight<float>("bias", DType::kFloat32, {dim});
  const auto* table = bind.weight<BFloat16>("table", DType::kBFloat16, {side * side, dim});
  return [=, run = plugins.vision_position_embedding](const VisionTile& tile, Stream stream) {
    run({.x = x.in(tile),
         .bias = bias,
         .table = table,
         .grid = tile.grid,
         .side = side,
         .dim = dim,
         .first_row = tile.first_row,
         .num_rows = tile.num_rows},
        stream);
  };
}

VisionOperator bind_layer_norm(const OpBinder& bind, const VisionConfig& config,
                               const PluginTable& plugins) {
  const std::int64_t dim = config.hidden_size;
  const TileRows x = tile_rows(bind, config, "x", RowKind::kPatches, dim);
  const TileRows out = tile_rows(bind, config, "out", RowKind::kPatchTile, dim);
  const auto* weight = bind.weight<float>("weight", DType::kFloat32, {dim});
  const auto* bias = bind.weight<float>("bias", DType::kFloat32, {dim});
  return [=, eps = config.layer_norm_eps, run = plugins.layer_norm](const VisionTile& tile,
                                                                    Stream stream) {
    run({.x = x.in(tile),
         .weight = weight,
         .bias = bias,
         .out = out.in(tile),
         .num_rows = tile.num_rows,
         .dim = dim,
         .eps = eps},
        stream);
  };
}

VisionOperator bind_vision_rotary(const OpBinder& bind, const VisionConfig& config,
                                  const PluginTable& plugins) {
  const std::int64_t dim = config.hidden_size;
  const TileRows qkv = tile_rows(bind, config, "qkv", RowKind::kPatchTile, 3 * dim);
  const TileRows out = tile_rows(bind, config, "out", RowKind::kPatches, dim);
  const auto* bias = bind.weight<float>("bias", DType::kFloat32, {3 * dim});
  return [=, run = plugins.vision_rotary](const VisionTile& tile, Stream stream) {
    run({.qkv = qkv.in(tile),
         .bias = bias,
         .angles = tile.angles,
         .q = out.in(tile),
         .kv = tile.kv,
         .grid = tile.grid,
         .first_row = tile.first_row,
         .num_rows = tile.num_rows},
        stream);
  };
}

VisionOperator bind_vision_attention(const OpBinder& bind, const VisionConfig& config,
                                     const PluginTable& plugins) {
  const TileRows q = tile_rows(bind, config, "q", RowKind::kPatches, config.hidden_size);
  const TileRows out = tile_rows(bind, config, "out", RowKind::kPatchTile, config.hidden_size);
  const float scale = 1.0F / std::sqrt(static_cast<float>(config.head_dim()));
  return [=, run = plugins.vision_attention](const VisionTile& tile, Stream stream) {
    run({.q = q.in(tile),
         .kv = tile.kv,
         .out = out.in(tile),
         .num_rows = tile.num_rows,
         .scale = scale},
        stream);
  };
}

VisionOperator bind_bias_residual(const OpBinder& bind, const VisionConfig& config,
                                  const PluginTable& plugins) {
  const std::int64_t dim = config.hidden_size;
  const TileRows y = tile_rows(bind, config, "y", RowKind::kPatchTile, dim);
  const TileRows residual = tile_rows(bind, config, "residual", RowKind::kPatches, dim);
  const auto* bias = bind.weight<float>("bias", DType::kFloat32, {dim});
  return [=, run = plugins.bias_residual](const VisionTile& tile, Stream stream) {
    run({.y = y.in(tile),
         .bias = bias,
         .residual = residual.in(tile),
         .num_rows = tile.num_rows,
         .dim = dim},
        stream);
  };
}

VisionOperator bind_bias_activation(const OpBinder& bind, const VisionConfig& config,
                                    Activation activation, const PluginTable& plugins) {
  const TileRows x = tile_rows(bind, config, "x");
  const auto* bias = bind.weight<float>("bias", DType::kFloat32, {x.width});
  return [=, run = plugins.bias_activation](const VisionTile& tile, Stream stream) {
    run({.x = x.in(tile),
         .bias = bias,
         .out = x.in(tile),
         .num_rows = x.count(tile),
         .dim = x.width,
         .activation = activation},
        stream);
  };
}

}  // namespace

bool has_vision_ops(const PluginTable& plugins) {
  return plugins.patchify && plugins.vision_position_embedding && plugins.layer_norm &&
         plugins.vision_rotary && plugins.vision_attention && plugins.bias_activation &&
         plugins.bias_residual;
}

VisionOperator bind_vision_operator(const OpSpec& op, const ModelMemory& memory,
                                    const VisionConfig& config, const PluginTable& plugins) {
  if (!op.segment.empty()) {
    return bind_vision_segment(op, memory, config);
  }
  const OpBinder bind(op, memory);
  const std::string& name = op.plugin;
  if (name == "patchify") {
    return bind_patchify(bind, config, plugins);
  }
  if (name == "vision_position_embedding") {
    return bind_position_embedding(bind, config, plugins);
  }
  if (name == "layer_norm") {
    return bind_layer_norm(bind, config, plugins);
  }
  if (name == "vision_rotary") {
    return bind_vision_rotary(bind, config, plugins);
  }
  if (name == "vision_attention") {
    return bind_vision_attention(bind, config, plugins);
  }
  if (name == "bias_residual") {
    return bind_bias_residual(bind, config, plugins);
  }
  if (name == "bias") {
    return bind_bias_activation(bind, config, Activation::kNone, plugins);
  }
  if (name == "bias_gelu_tanh") {
    return bind_bias_activation(bind, config, Activation::kGeluTanh, plugins);
  }
  if (name == "bias_gelu_erf") {
    return bind_bias_activation(bind, config, Activation::kGeluErf, plugins);
  }
  bind.fail("is not a plugin of this runtime's vision step");
}

}  // namespace deltaflash
