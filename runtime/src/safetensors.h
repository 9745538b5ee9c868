#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "plugins/common/dtype.h"

namespace deltaflash {

/// A tensor in mapped memory; the file that maps it owns the bytes.
struct HostTensor {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;

  std::size_t num_bytes() const;
};

/// A safetensors file, mapped read-only. Only BF16, F32 and I32 tensors are accepted.
class SafetensorsFile {
 public:
  /// Throws EngineError for a file that is no whole safetensors file.
  explicit SafetensorsFile(const std::filesystem::path& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::map<std::string, HostTensor>& tensors() const { return tensors_; }

 private:
  void* mapping_ = nullptr;
  std::size_t num_bytes_ = 0;
  std::map<std::string, HostTensor> tensors_;
};

}  // namespace deltaflash
