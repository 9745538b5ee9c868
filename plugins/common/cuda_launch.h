#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "plugins/common/dtype.h"
#include "plugins/common/stream.h"

namespace deltaflash {

inline cudaStream_t cuda_stream(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

/// `num_blocks` as grid.x, the one grid axis that is not limited to 65535.
/// Throws std::invalid_argument beyond 2^31 - 1.
inline unsigned grid_x(std::int64_t num_blocks, const char* op) {
  if (num_blocks < 0 || num_blocks > std::numeric_limits<std::int32_t>::max()) {
    throw std::invalid_argument(std::string(op) + ": expected a grid of 0 to 2^31 - 1 CTAs, got " +
                                std::to_string(num_blocks));
  }
  return static_cast<unsigned>(num_blocks);
}

inline void require_float32(DType dtype, const char* op) {
  if (dtype != DType::kFloat32) {
    throw std::invalid_argument(std::string(op) + ": expected dtype float32, got " +
                                std::string(name_of(dtype)));
  }
}

inline void require_positive(std::int64_t value, const char* op, const char* name) {
  if (value <= 0) {
    throw std::invalid_argument(std::string(op) + ": expected " + name + " > 0, got " +
                                std::to_string(value));
  }
}

constexpr std::int64_t ceil_div(std::int64_t count, std::int64_t size) {
  return (count + size - 1) / size;
}

}  // namespace deltaflash
