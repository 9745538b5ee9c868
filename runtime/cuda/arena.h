#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

namespace deltaflash::cuda {

/// Memory that lives as long as its arena: on the device, or pinned on the host and readable by
/// kernels under the same address. Small requests share a block.
class Arena {
 public:
  enum class Place { kDevice, kPinnedHost };

  /// Blocks on the device are zeroed on `stream`, those on the host at once.
  Arena(Place place, cudaStream_t stream) : place_(place), stream_(stream) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Zero-filled, 256-byte aligned. Throws EngineError where the memory does not suffice.
  void* allocate(std::size_t num_bytes);

 private:
  std::byte* allocate_block(std::size_t num_bytes);

  Place place_;
  cudaStream_t stream_;
  std::vector<void*> blocks_;
  std::byte* next_ = nullptr;
  std::size_t left_ = 0;
};

}  // namespace deltaflash::cuda
