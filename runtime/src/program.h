#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plugins/common/dtype.h"

namespace deltaflash {

/// Sizes of the network, from program.json. Heads and dims as in the checkpoint's config.
struct ModelConfig {
  std::int64_t vocab_size;
  std::int64_t hidden_size;
  std::int64_t num_layers;
  std::int64_t num_gdn_layers;
  std::int64_t num_attention_layers;
  std::int64_t context_len;  // tokens of prompt and output together
  float rms_norm_eps;
  // Full attention.
  std::int64_t num_heads;
  std::int64_t num_kv_heads;
  std::int64_t head_dim;
  std::int64_t rotary_dim;
  std::array<std::int32_t, 3> mrope_section;
  std::vector<float> inv_freq;  // [rotary_dim / 2]
  float attention_factor;
  // Gated DeltaNet.
  std::int64_t num_key_heads;
  std::int64_t num_value_heads;
  std::int64_t key_dim;
  std::int64_t value_dim;
  std::int64_t conv_kernel;

  std::int64_t conv_channels() const {
    return 2 * num_key_heads * key_dim + num_value_heads * value_dim;
  }
};

/// Sizes of the vision encoder and what it does to pixels.
struct VisionConfig {
  std::int64_t depth;
  std::int64_t hidden_size;
  std::int64_t num_heads;
  std::int64_t intermediate_size;
  std::int64_t patch_size;     // pixels
  std::int64_t num_frames;     // of a patch; all show the one picture
  std::int64_t merge_size;     // rows and columns of patches that become one token
  std::int64_t position_side;  // of the learned position table
  float layer_norm_eps;
  float rotary_theta;
  std::int32_t image_token_id;
  std::int64_t min_pixels;          // of a resized picture
  std::int64_t max_pixels;          // of a resized picture
  std::vector<float> pixel_levels;  // [3, 256]

  std::int64_t head_dim() const { return hidden_size / num_heads; }
  std::int64_t factor() const { return patch_size * merge_size; }  // pixels of a token's side
  std::int64_t merged() const { return merge_size * merge_size; }  // patches of a token
};

/// How many rows of a buffer a step fills. Those of the vision step are as long as the picture or
/// as the tile of rows at hand.
enum class RowKind : std::uint8_t {
  kTokens,
  kLogits,
  kPatches,
  kPatchTile,
  kImageTokens,
  kImageTokenTile,
};

/// As program.json spells it.
std::string_view name_of(RowKind rows);

struct BufferSpec {
  RowKind rows;
  std::int64_t width;  // elements of one row
  DType dtype;
};

/// A dense part of the network between two plugins; a provider runs it.
struct SegmentSpec {
  std::string kind;  // "linear"
  std::string weight;
  std::int64_t in_dim;
  std::int64_t out_dim;
};

/// One entry of a step: a segment or a plugin, over named buffers and weights.
struct OpSpec {
  std::string segment;  // name of a segment, or empty
  std::string plugin;   // name of a plugin, or empty
  std::map<std::string, std::string> buffers;
  std::map<std::string, std::string> weights;
  std::map<std::string, std::int64_t> attrs;  // booleans are 0 and 1

  const std::string& name() const { return plugin.empty() ? segment : plugin; }
};

/// program.json: what the steps of the network are, whoever runs them.
struct Program {
  ModelConfig config;
  std::map<std::string, BufferSpec> buffers;
  std::map<std::string, SegmentSpec> segments;
  std::vector<OpSpec> prefill;
  std::vector<OpSpec> verify;
  std::vector<OpSpec> commit;
  std::optional<VisionConfig> vision;
  /// The stages of the vision step: each runs on tiles of rows, and begins when the one before has
  /// done the whole picture.
  std::vector<std::vector<OpSpec>> vision_stages;
};

/// Throws EngineError naming the file and the entry that is wrong.
Program read_program(const std::filesystem::path& path);

}  // namespace deltaflash
