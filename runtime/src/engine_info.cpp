#include "runtime/src/engine_info.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "plugins/common/error.h"

namespace deltaflash {
namespace {

nlohmann::json read_json(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) {
    throw EngineError(path.string() + ": cannot be opened");
  }
  try {
    return nlohmann::json::parse(file);
  } catch (const nlohmann::json::exception& error) {
    throw EngineError(path.string() + ": " + error.what());
  }
}

}  // namespace

EngineInfo read_engine_info(const std::filesystem::path& engine_dir) {
  const nlohmann::json manifest = read_json(engine_dir / "manifest.json");
  const nlohmann::json generation = read_json(engine_dir / "generation.json");
  try {
    EngineInfo info;
    info.engine_id = manifest.at("engine_id").get<std::string>();
    info.model_name = manifest.at("model").at("name").get<std::string>();
    info.architecture = manifest.at("model").at("architecture").get<std::string>();
    info.end_ids = generation.at("end_ids").get<std::vector<TokenId>>();
    if (info.end_ids.size() > kMaxEndIds) {
      throw EngineError((engine_dir / "generation.json").string() + ": " +
                        std::to_string(info.end_ids.size()) + " end ids, at most " +
                        std::to_string(kMaxEndIds) + " are supported");
    }
    return info;
  } catch (const nlohmann::json::exception& error) {
    throw EngineError(engine_dir.string() + ": " + error.what());
  }
}

}  // namespace deltaflash
