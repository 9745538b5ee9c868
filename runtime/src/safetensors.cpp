#include "runtime/src/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>

#include "plugins/common/error.h"

namespace deltaflash {
namespace {

DType parse_dtype(const std::string& file, const std::string& tensor, const std::string& name) {
  if (name == "F32") {
    return DType::kFloat32;
  }
  if (name == "BF16") {
    return DType::kBFloat16;
  }
  if (name == "I32") {
    return DType::kInt32;
  }
  throw EngineError(file + ": tensor " + tensor + " has dtype " + name +
                    ", expected F32, BF16 or I32");
}

/// Nothing where the shape is negative or its bytes cannot be counted.
std::optional<std::size_t> bytes_of(const HostTensor& tensor) {
  std::size_t bytes = size_of(tensor.dtype);
  for (const std::int64_t extent : tensor.shape) {
    if (extent < 0 || __builtin_mul_overflow(bytes, static_cast<std::size_t>(extent), &bytes)) {
      return std::nullopt;
    }
  }
  return bytes;
}

}  // namespace

std::size_t HostTensor::num_bytes() const {
  std::size_t count = size_of(dtype);
  for (const std::int64_t extent : shape) {
    count *= static_cast<std::size_t>(extent);
  }
  return count;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) {
  const std::string name = path.string();
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    throw EngineError(name + ": cannot be opened: " + std::generic_category().message(errno));
  }
  struct stat status{};
  const bool known = ::fstat(fd, &status) == 0;
  num_bytes_ = known ? static_cast<std::size_t>(status.st_size) : 0;
  if (num_bytes_ < 8) {
    ::close(fd);
    throw EngineError(name + ": " + std::to_string(num_bytes_) +
                      " bytes, expected a safetensors file");
  }
  mapping_ = ::mmap(nullptr, num_bytes_, PROT_READ, MAP_SHARED, fd, 0);
  ::close(fd);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw EngineError(name + ": cannot be mapped: " + std::generic_category().message(errno));
  }
  try {
    const auto* bytes = static_cast<const unsigned char*>(mapping_);
    std::uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, bytes, sizeof header_bytes);
    if (header_bytes > num_bytes_ - 8) {
      throw EngineError(name + ": truncated, the header alone needs " +
                        std::to_string(header_bytes) + " bytes");
    }
    const std::size_t data_begin = 8 + header_bytes;
    const std::size_t data_bytes = num_bytes_ - data_begin;
    const auto* text = reinterpret_cast<const char*>(bytes + 8);
    const nlohmann::json header = nlohmann::json::parse(text, text + header_bytes);
    for (const auto& [tensor_name, entry] : header.items()) {
      if (tensor_name == "__metadata__") {
        continue;
      }
      HostTensor tensor;
      tensor.dtype = parse_dtype(name, tensor_name, entry.at("dtype").get<std::string>());
      tensor.shape = entry.at("shape").get<std::vector<std::int64_t>>();
      const std::optional<std::size_t> num_bytes = bytes_of(tensor);
      const auto offsets = entry.at("data_offsets").get<std::vector<std::uint64_t>>();
      if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > data_bytes ||
          offsets[1] - offsets[0] != num_bytes ||
          (data_begin + offsets[0]) % size_of(tensor.dtype) != 0) {
        throw EngineError(name + ": tensor " + tensor_name + " does not fit its data range");
      }
      tensor.data = bytes + data_begin + offsets[0];
      tensors_.emplace(tensor_name, std::move(tensor));
    }
  } catch (const nlohmann::json::exception& error) {
    ::munmap(mapping_, num_bytes_);
    throw EngineError(name + ": broken safetensors header: " + error.what());
  } catch (...) {
    ::munmap(mapping_, num_bytes_);
    throw;
  }
}

SafetensorsFile::~SafetensorsFile() { ::munmap(mapping_, num_bytes_); }

}  // namespace deltaflash
