#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "runtime/src/types.h"

namespace deltaflash {

/// What an engine directory says of itself besides its program and weights.
struct EngineInfo {
  std::string engine_id;
  std::string model_name;
  std::string architecture;
  std::vector<TokenId> end_ids;
  std::int64_t vocab_size = 0;
  std::int64_t context_len = 0;
  std::int64_t num_layers = 0;
};

/// Reads manifest.json and generation.json; vocab_size, context_len and num_layers are the
/// program's to fill in. Digests were checked by `runtime.engine_directory` before.
/// Throws EngineError naming the file.
EngineInfo read_engine_info(const std::filesystem::path& engine_dir);

}  // namespace deltaflash
