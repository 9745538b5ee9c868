#pragma once

#include <cstdint>
#include <string>

#include "runtime/src/engine_info.h"
#include "runtime/src/program.h"
#include "runtime/src/types.h"

namespace deltaflash {

/// Throws std::invalid_argument: "FIELD: FOUND, expected EXPECTED".
[[noreturn]] void refuse(const std::string& field, const std::string& found,
                         const std::string& expected);

/// Throws std::invalid_argument for a value with which no executor can work.
void check_config(const ExecutorConfig& config);

/// Tokens of the KV pool: max_kv_tokens, or its default for this model.
/// Throws std::invalid_argument for more than pages can count.
std::int64_t pool_tokens(const ExecutorConfig& config, const ModelConfig& model);

/// Throws std::invalid_argument naming the field that the engine does not take. `pool_room` is how
/// many tokens the KV pool can hold behind this prompt, and may be negative.
void check_request(const Request& request, const ExecutorConfig& config, const EngineInfo& engine,
                   std::int64_t pool_room);

}  // namespace deltaflash
