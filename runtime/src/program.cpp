#include "runtime/src/program.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "plugins/common/error.h"

namespace deltaflash {
namespace {

using nlohmann::json;

constexpr int kSchemaVersion = 1;

ModelConfig parse_config(const json& entry) {
  ModelConfig config{};
  config.vocab_size = entry.at("vocab_size").get<std::int64_t>();
  config.hidden_size = entry.at("hidden_size").get<std::int64_t>();
  config.num_layers = entry.at("num_layers").get<std::int64_t>();
  config.num_gdn_layers = entry.at("num_gdn_layers").get<std::int64_t>();
  config.num_attention_layers = entry.at("num_attention_layers").get<std::int64_t>();
  config.context_len = entry.at("context_len").get<std::int64_t>();
  config.rms_norm_eps = entry.at("rms_norm_eps").get<float>();
  config.num_heads = entry.at("num_heads").get<std::int64_t>();
  config.num_kv_heads = entry.at("num_kv_heads").get<std::int64_t>();
  config.head_dim = entry.at("head_dim").get<std::int64_t>();
  config.rotary_dim = entry.at("rotary_dim").get<std::int64_t>();
  config.mrope_section = entry.at("mrope_section").get<std::array<std::int32_t, 3>>();
  config.inv_freq = entry.at("inv_freq").get<std::vector<float>>();
  config.attention_factor = entry.at("attention_factor").get<float>();
  config.num_key_heads = entry.at("num_key_heads").get<std::int64_t>();
  config.num_value_heads = entry.at("num_value_heads").get<std::int64_t>();
  config.key_dim = entry.at("key_dim").get<std::int64_t>();
  config.value_dim = entry.at("value_dim").get<std::int64_t>();
  config.conv_kernel = entry.at("conv_kernel").get<std::int64_t>();
  if (static_cast<std::int64_t>(config.inv_freq.size()) * 2 != config.rotary_dim) {
    throw EngineError(
        "config.inv_freq has " + std::to_string(config.inv_freq.size()) +
        " values, expected rotary_dim / 2 = " + std::to_string(config.rotary_dim / 2));
  }
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
  return {rows == "tokens" ? RowKind::kTokens : RowKind::kLogits,
          entry.at("width").get<std::int64_t>(), DType::kFloat32};
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
      throw EngineError("op " + entry.dump() + " must name one segment or one plugin");
    }
    op.buffers = entry.value("buffers", std::map<std::string, std::string>{});
    op.weights = entry.value("weights", std::map<std::string, std::string>{});
    op.attrs = parse_attrs(entry.value("attrs", json::object()));
    ops.push_back(std::move(op));
  }
  return ops;
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
      program.buffers.emplace(entry.at("name").get<std::string>(), parse_buffer(entry));
    }
    for (const json& entry : document.at("segments")) {
      program.segments.emplace(
          entry.at("name").get<std::string>(),
          SegmentSpec{entry.at("kind").get<std::string>(), entry.at("weight").get<std::string>(),
                      entry.at("in_dim").get<std::int64_t>(),
                      entry.at("out_dim").get<std::int64_t>()});
    }
    const json& steps = document.at("steps");
    program.prefill = parse_step(steps.at("prefill"));
    program.verify = parse_step(steps.at("verify"));
    program.commit = parse_step(steps.at("commit"));
    return program;
  } catch (const json::exception& error) {
    throw EngineError(path.string() + ": " + error.what());
  } catch (const EngineError& error) {
    throw EngineError(path.string() + ": " + error.what());
  }
}

}  // namespace deltaflash
