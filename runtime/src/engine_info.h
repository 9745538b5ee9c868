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
  // Pictures, if the engine has a vision encoder and the device can run it.
  bool has_vision = false;
  TokenId image_token_id = -1;        // placeholder of one token of a picture
  std::int64_t image_factor = 0;      // height and width are multiples of it, in pixels
  std::int64_t min_image_pixels = 0;  // what the model was trained with; not enforced
  std::int64_t max_image_pixels = 0;
  std::int64_t vision_bytes = 0;  // memory reserved for encoding the largest picture
};

/// Reads manifest.json and generation.json; vocab_size and what follows are the program's to fill
/// in. Digests were checked by `runtime.engine_directory` before.
/// Throws EngineError naming the file.
EngineInfo read_engine_info(const std::filesystem::path& engine_dir);

}  // namespace deltaflash
