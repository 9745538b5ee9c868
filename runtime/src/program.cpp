#include "runtime/src/program.h"

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "plugins/common/error.h"

namespace deltaflash {
namespace {

using nlohmann::json;

constexpr int kSchemaVersion = 1;

constexpr std::int64_t kMaxSize = 1 << 24;  // above any width; products of a few do not overflow
constexpr std::int64_t kMaxContext = std::numeric_limits<std::int32_t>::max();
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

BufferSpec parse_buffer(const json& entry) {
  const auto rows = entry.at("rows").get<std::string>();
  if (rows != "tokens" && rows != "logits") {
    throw EngineError("buffer rows are \"" + rows + "\", expected \"tokens\" or \"logits\"");
  }
  if (const auto dtype = entry.at("dtype").get<std::string>(); dtype != "float32") {
    throw EngineError("buffer dtype is \"" + dtype + "\", expected \"float32\"");
  }
  return {rows == "tokens" ? RowKind::kTokens : RowKind::kLogits, size_at(entry, "width"),
          DType::kFloat32};
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

void check_steps(const Program& program) {
  check_step("prefill", program.prefill, program.config);
  check_step("verify", program.verify, program.config);
  if (program.commit.size() != 1 || program.commit.front().plugin != "commit_round") {
    throw EngineError("commit is not commit_round alone");
  }
}

}  // namespace

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
    program.config = parse_config(document.at("config"));
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
    check_steps(program);
    return program;
  } catch (const json::exception& error) {
    throw EngineError(path.string() + ": " + error.what());
  } catch (const EngineError& error) {
    throw EngineError(path.string() + ": " + error.what());
  }
}

}  // namespace deltaflash
