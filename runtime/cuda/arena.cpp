#include "runtime/cuda/arena.h"

#include <cstring>
#include <string>

#include "plugins/common/cuda_error.h"
#include "plugins/common/error.h"

namespace deltaflash::cuda {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr std::size_t kBlockBytes = std::size_t{32} << 20;

}  // namespace

Arena::~Arena() {
  for (void* block : blocks_) {
    // Nobody is left to hear of a failure.
    static_cast<void>(place_ == Place::kDevice ? cudaFree(block) : cudaFreeHost(block));
  }
}

void* Arena::allocate(std::size_t num_bytes) {
  const std::size_t size =
      (num_bytes + kAlignment - 1) / kAlignment * kAlignment + (num_bytes == 0 ? kAlignment : 0);
  if (size > kBlockBytes / 2) {
    return allocate_block(size);
  }
  if (size > left_) {
    next_ = allocate_block(kBlockBytes);
    left_ = kBlockBytes;
  }
  void* taken = next_;
  next_ += size;
  left_ -= size;
  return taken;
}

std::byte* Arena::allocate_block(std::size_t num_bytes) {
  void* block = nullptr;
  const bool on_device = place_ == Place::kDevice;
  const cudaError_t status =
      on_device ? cudaMalloc(&block, num_bytes)
                : cudaHostAlloc(&block, num_bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());  // not sticky: the device is as usable as before
    throw EngineError("cannot allocate " + std::to_string(num_bytes) + " bytes of " +
                      (on_device ? "device" : "pinned host") + " memory");
  }
  check_cuda(status, on_device ? "cudaMalloc" : "cudaHostAlloc");
  blocks_.push_back(block);
  if (on_device) {
    check_cuda(cudaMemsetAsync(block, 0, num_bytes, stream_), "cudaMemsetAsync");
  } else {
    std::memset(block, 0, num_bytes);
  }
  return static_cast<std::byte*>(block);
}

}  // namespace deltaflash::cuda
