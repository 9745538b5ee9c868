#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace deltaflash {

enum class DType : std::uint8_t { kFloat32, kBFloat16, kInt32 };

constexpr std::size_t size_of(DType dtype) { return dtype == DType::kBFloat16 ? 2 : 4; }

constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kInt32:
      return "int32";
  }
  return "unknown";
}

/// The bits of a bfloat16: the upper half of a binary32.
struct BFloat16 {
  std::uint16_t bits;

  constexpr float to_float() const {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
};

}  // namespace deltaflash
