#include "runtime/src/program.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "plugins/common/error.h"

namespace deltaflash {
namespace {

using nlohmann::json;

constexpr int kSchemaVersion = 1;

constexpr std::int64_t kMaxSize = 1 << 24;  // above any width; products of a few do not overflow
constexpr std::int64_t kMaxContext = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMaxPatchSize = 1 << 10;
constexpr std::int64_t kMaxMergeSize = 4;
constexpr std::int64_t kMinVisionHeadDim = 16;  // the vision ops take 16 to 128
constexpr std::int64_t kMaxVisionHeadDim = 128;
constexpr std::int64_t kMaxPixels = 1 << 28;
constexpr std::size_t kNumLevels = std::size_t{3} * 256;
constexpr std::int64_t kMaxConvKernel = 16;  // taps the causal_conv ops take

[[noreturn]] void refuse(const std::string& field, const std::string& found,
                         const std::string& expected) {
  throw EngineError(field + " is " + found + ", expected " + expected);
}

std::int64_t size_at(const json& entry, const char* name, std::int64_t least = 1,
                     std::int64_t most = kMaxSize) {
  const json& value = entry.at(name);
  // What is beyond 63 bits turns negative, and no size is.
  const std::int64_t size = value.is_number_integer() ? value.get<std::int64_t>() : -1;
  if (size < least || size > most) {
    refuse(name, value.is_number() ? value.dump() : value.type_name(),
           std::to_string(least) + " to " + std::to_string(most));
  }
  return size;
}

float finite_at(const json& entry, const char* name) {
  const auto value = entry.at(name).get<float>();
  if (!std::isfinite(value)) {
    refuse(name, std::to_string(value), "a finite number");
  }
  return value;
}

void check_multiple(const char* name, std::int64_t value, std::int64_t of) {
  if (value % of != 0) {
    refuse(name, std::to_string(value), "a multiple of " + std::to_string(of));
  }
}

/// What the ops of every device need of the sizes.
void check_config(const ModelConfig& config) {
  check_multiple("num_heads", config.num_heads, config.num_kv_heads);
  check_multiple("num_value_heads", config.num_value_heads, config.num_key_heads);
  check_multiple("head_dim", config.head_dim, 8);
  check_multiple("rotary_dim", config.rotary_dim, 2);
  if (config.rotary_dim > config.head_dim) {
    refuse("rotary_dim", std::to_string(config.rotary_dim),
           "at most head_dim = " + std::to_string(config.head_dim));
  }
  std::int64_t frequencies = 0;
  for (const std::int32_t section : config.mrope_section) {
    if (section < 0) {
      refuse("mrope_section", std::to_string(section), "0 and up");
    }
    frequencies += section;
  }
  if (frequencies * 2 != config.rotary_dim) {
    refuse("sum of mrope_section", std::to_string(frequencies), "rotary_dim / 2");
  }
  if (static_cast<std::int64_t>(config.inv_freq.size()) * 2 != config.rotary_dim) {
    throw EngineError(
        "config.inv_freq has " + std::to_string(config.inv_freq.size()) +
        " values, expected rotary_dim / 2 = " + std::to_string(config.rotary_dim / 2));
  }
  for (const float frequency : config.inv_freq) {
    if (!std::isfinite(frequency)) {
      refuse("inv_freq", std::to_string(frequency), "finite numbers");
    }
  }
}

ModelConfig parse_config(const json& entry) {
  ModelConfig config{};
  config.vocab_size = size_at(entry, "vocab_size");
  config.hidden_size = size_at(entry, "hidden_size");
  config.num_layers = size_at(entry, "num_layers");
  config.num_gdn_layers = size_at(entry, "num_gdn_layers", 0);
  config.num_attention_layers = size_at(entry, "num_attention_layers", 0);
  config.context_len = size_at(entry, "context_len", 2, kMaxContext);
  config.rms_norm_eps = finite_at(entry, "rms_norm_eps");
  config.num_heads = size_at(entry, "num_heads");
  config.num_kv_heads = size_at(entry, "num_kv_heads");
  config.head_dim = size_at(entry, "head_dim");
  config.rotary_dim = size_at(entry, "rotary_dim");
  config.mrope_section = entry.at("mrope_section").get<std::array<std::int32_t, 3>>();
  config.inv_freq = entry.at("inv_freq").get<std::vector<float>>();
  config.attention_factor = finite_at(entry, "attention_factor");
  config.num_key_heads = size_at(entry, "num_key_heads");
  config.num_value_heads = size_at(entry, "num_value_heads");
  config.key_dim = size_at(entry, "key_dim");
  config.value_dim = size_at(entry, "value_dim");
  config.conv_kernel = size_at(entry, "conv_kernel", 1, kMaxConvKernel);
  check_config(config);
  return config;
}

constexpr std::array<std::pair<std::string_view, RowKind>, 6> kRowKinds = {{
    {"tokens", RowKind::kTokens},
    {"logits", RowKind::kLogits},
    {"patches", RowKind::kPatches},
    {"patch_tile", RowKind::kPatchTile},
    {"image_tokens", RowKind::kImageTokens},
    {"image_token_tile", RowKind::kImageTokenTile},
}};

BufferSpec parse_buffer(const json& entry) {
  const auto rows = entry.at("rows").get<std::string>();
  const auto* const kind = std::find_if(kRowKinds.begin(), kRowKinds.end(),
                                        [&](const auto& known) { return known.first == rows; });
  if (kind == kRowKinds.end()) {
    throw EngineError("buffer rows are \"" + rows +
                      "\", expected \"tokens\", \"logits\" or a kind of the vision step");
  }
  if (const auto dtype = entry.at("dtype").get<std::string>(); dtype != "float32") {
    throw EngineError("buffer dtype is \"" + dtype + "\", expected \"float32\"");
  }
  return {kind->second, size_at(entry, "width"), DType::kFloat32};
}

VisionConfig parse_vision(const json& entry, const ModelConfig& model) {
  VisionConfig config{};
  config.depth = size_at(entry, "depth");
  config.hidden_size = size_at(entry, "hidden_size");
  config.num_heads = size_at(entry, "num_heads");
  config.intermediate_size = size_at(entry, "intermediate_size");
  config.patch_size = size_at(entry, "patch_size", 1, kMaxPatchSize);
  config.num_frames = size_at(entry, "num_frames", 1, kMaxPatchSize);
  config.merge_size = size_at(entry, "merge_size", 1, kMaxMergeSize);
  if (kMaxMergeSize % config.merge_size != 0) {
    refuse("merge_size", std::to_string(config.merge_size), "1, 2 or 4");
  }
  config.position_side = size_at(entry, "position_side");
  config.layer_norm_eps = finite_at(entry, "layer_norm_eps");
  config.rotary_theta = finite_at(entry, "rotary_theta");
  config.image_token_id =
      static_cast<std::int32_t>(size_at(entry, "image_token_id", 0, model.vocab_size - 1));
  config.max_pixels = size_at(entry, "max_pixels", config.factor() * config.factor(), kMaxPixels);
  config.min_pixels = size_at(entry, "min_pixels", 1, config.max_pixels);
  check_multiple("hidden_size of vision", config.hidden_size, config.num_heads);
  check_multiple("head_dim of vision", config.head_dim(), 4);
  if (config.head_dim() < kMinVisionHeadDim || config.head_dim() > kMaxVisionHeadDim) {
    refuse("head_dim of vision", std::to_string(config.head_dim()),
           std::to_string(kMinVisionHeadDim) + " to " + std::to_string(kMaxVisionHeadDim));
  }
  for (const auto& channel : entry.at("pixel_levels").get<std::vector<std::vector<float>>>()) {
    config.pixel_levels.insert(config.pixel_levels.end(), channel.begin(), channel.end());
  }
  if (config.pixel_levels.size() != kNumLevels) {
    refuse("pixel_levels", std::to_string(config.pixel_levels.size()) + " numbers", "3 x 256");
  }
  return config;
}

std::map<std::string, std::int64_t> parse_attrs(const json& entry) {
  std::map<std::string, std::int64_t> attrs;
  for (const auto& [name, value] : entry.items()) {
    attrs[name] = value.is_boolean() ? static_cast<std::int64_t>(value.get<bool>())
                                     : value.get<std::int64_t>();
  }
  return attrs;
}

std::vector<OpSpec> parse_step(const json& entries) {
  std::vector<OpSpec> ops;
  for (const json& entry : entries) {
    OpSpec op;
    op.segment = entry.value("segment", "");
    op.plugin = entry.value("plugin", "");
    if (op.segment.empty() == op.plugin.empty()) {
      throw EngineError("op " + std::to_string(ops.size()) +
                        " of a step must name one segment or one plugin");
    }
    op.buffers = entry.value("buffers", std::map<std::string, std::string>{});
    op.weights = entry.value("weights", std::map<std::string, std::string>{});
    op.attrs = parse_attrs(entry.value("attrs", json::object()));
    ops.push_back(std::move(op));
  }
  return ops;
}

/// Each layer runs once and in order, and a step samples once: the cursors of the slots rely on it.
void check_step(const std::string& step, const std::vector<OpSpec>& ops,
                const ModelConfig& config) {
  std::map<std::string, std::int64_t> next{{"causal_conv", 0},
                                           {"gated_delta_net_" + step, 0},
                                           {"rotary_kv_write", 0},
                                           {"gated_attention", 0}};
  std::int64_t num_samples = 0;
  for (const OpSpec& op : ops) {
    num_samples += op.plugin == "sample_accept" ? 1 : 0;
    const bool has_layer = op.attrs.contains("gdn_layer") || op.attrs.contains("kv_layer");
    const auto found = next.find(op.plugin);
    if (op.plugin == "commit_round" || (has_layer && found == next.end())) {
      throw EngineError(step + " runs " + op.plugin + ", which belongs to another step");
    }
    if (found == next.end()) {
      continue;
    }
    const auto layer = op.attrs.find(op.attrs.contains("gdn_layer") ? "gdn_layer" : "kv_layer");
    if (layer == op.attrs.end() || layer->second != found->second++) {
      throw EngineError(step + " does not run the layers of " + op.plugin + " once and in order");
    }
  }
  for (const auto& [plugin, count] : next) {
    const bool attention = plugin == "rotary_kv_write" || plugin == "gated_attention";
    if (count != (attention ? config.num_attention_layers : config.num_gdn_layers)) {
      throw EngineError(step + " runs " + std::to_string(count) + " layers of " + plugin +
                        ", not all of them");
    }
  }
  if (num_samples != 1) {
    throw EngineError(step + " runs sample_accept " + std::to_string(num_samples) +
                      " times, expected once");
  }
}

/// The stages of a whole encoder: one that cuts patches, two for each block. Keys and values of a
/// block are complete before attention reads them, and are read before the next block's are made.
void check_vision(const Program& program) {
  const auto& stages = program.vision_stages;
  const std::int64_t depth = program.vision ? program.vision->depth : 0;
  const auto expected = program.vision ? static_cast<std::size_t>(2 * depth + 1) : std::size_t{0};
  if (stages.size() != expected) {
    throw EngineError("vision has " + std::to_string(stages.size()) + " stages, expected " +
                      std::to_string(expected));
  }
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const std::string name = "stage " + std::to_string(i) + " of vision";
    if (stages[i].empty()) {
      throw EngineError(name + " is empty");
    }
    for (const OpSpec& op : stages[i]) {
      const bool first = &op == &stages[i].front();
      const bool last = &op == &stages[i].back();
      if ((op.plugin == "patchify") != (i == 0 && first) ||
          (op.plugin == "vision_rotary") != (i % 2 == 1 && last) ||
          (op.plugin == "vision_attention") != (i > 0 && i % 2 == 0 && first)) {
        throw EngineError(name + " has " + op.name() + " out of its place");
      }
    }
  }
  for (const auto* step : {&program.prefill, &program.verify, &program.commit}) {
    for (std::size_t i = 0; i < step->size(); ++i) {
      const bool expects = program.vision && step == &program.prefill && i == 1;
      if (((*step)[i].plugin == "image_rows") != expects) {
        throw EngineError("image_rows does not stand behind the embedding of prefill alone");
      }
    }
  }
}

void check_steps(const Program& program) {
  check_step("prefill", program.prefill, program.config);
  check_step("verify", program.verify, program.config);
  if (program.commit.size() != 1 || program.commit.front().plugin != "commit_round") {
    throw EngineError("commit is not commit_round alone");
  }
  check_vision(program);
}

}  // namespace

std::string_view name_of(RowKind rows) {
  const auto* const kind = std::find_if(kRowKinds.begin(), kRowKinds.end(),
                                        [&](const auto& known) { return known.second == rows; });
  return kind->first;
}

Program read_program(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) {
    throw EngineError(path.string() + ": cannot be opened");
  }
  try {
    const json document = json::parse(file);
    if (const int version = document.at("schema_version").get<int>(); version != kSchemaVersion) {
      throw EngineError("schema_version is " + std::to_string(version) + ", expected " +
                        std::to_string(kSchemaVersion));
    }
    Program program;
    const json& config = document.at("config");
    program.config = parse_config(config);
    if (const auto vision = config.find("vision"); vision != config.end() && !vision->is_null()) {
      program.vision = parse_vision(*vision, program.config);
    }
    for (const json& entry : document.at("buffers")) {
      const auto name = entry.at("name").get<std::string>();
      if (!program.buffers.emplace(name, parse_buffer(entry)).second) {
        throw EngineError("two buffers have the name \"" + name + "\"");
      }
    }
    for (const json& entry : document.at("segments")) {
      const auto name = entry.at("name").get<std::string>();
      SegmentSpec segment{entry.at("kind").get<std::string>(),
                          entry.at("weight").get<std::string>(), size_at(entry, "in_dim"),
                          size_at(entry, "out_dim")};
      if (!program.segments.emplace(name, std::move(segment)).second) {
        throw EngineError("two segments have the name \"" + name + "\"");
      }
    }
    const json& steps = document.at("steps");
    program.prefill = parse_step(steps.at("prefill"));
    program.verify = parse_step(steps.at("verify"));
    program.commit = parse_step(steps.at("commit"));
    for (const json& stage : steps.value("vision", json::array())) {
      program.vision_stages.push_back(parse_step(stage));
    }
    check_steps(program);
    return program;
  } catch (const json::exception& error) {
    throw EngineError(path.string() + ": " + error.what());
  } catch (const EngineError& error) {
    throw EngineError(path.string() + ": " + error.what());
  }
}

}  // namespace deltaflash
