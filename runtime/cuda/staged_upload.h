#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>

#include "runtime/cuda/arena.h"
#include "runtime/cuda/handles.h"

namespace deltaflash::cuda {

/// Copies from host memory of any kind to the device, through pinned buffers used in turn: the
/// source may be reused at once, and the copy to the device overlaps the filling of the next
/// buffer.
class StagedUpload {
 public:
  /// Its buffers are taken from `host`.
  StagedUpload(Arena& host, cudaStream_t stream);

  void copy(void* device, const void* source, std::size_t num_bytes);

 private:
  static constexpr std::size_t kBufferBytes = std::size_t{4} << 20;

  struct Buffer {
    std::byte* data = nullptr;
    OwnedEvent drained;  // recorded when the stream has been given the last of its copies
    bool recorded = false;
  };

  void next_buffer();

  cudaStream_t stream_;
  std::array<Buffer, 4> buffers_;
  std::size_t current_ = 0;
  std::size_t used_ = 0;  // bytes of the current buffer
};

}  // namespace deltaflash::cuda
