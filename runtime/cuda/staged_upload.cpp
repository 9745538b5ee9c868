#include "runtime/cuda/staged_upload.h"

#include <algorithm>
#include <cstring>

#include "plugins/common/cuda_error.h"

namespace deltaflash::cuda {

StagedUpload::StagedUpload(Arena& host, cudaStream_t stream) : stream_(stream) {
  for (Buffer& buffer : buffers_) {
    buffer.data = static_cast<std::byte*>(host.allocate(kBufferBytes));
    buffer.drained = make_event();
  }
}

void StagedUpload::copy(void* device, const void* source, std::size_t num_bytes) {
  auto* to = static_cast<std::byte*>(device);
  const auto* from = static_cast<const std::byte*>(source);
  while (num_bytes > 0) {
    if (used_ == kBufferBytes) {
      next_buffer();
    }
    const std::size_t part = std::min(num_bytes, kBufferBytes - used_);
    std::byte* staged = buffers_[current_].data + used_;
    std::memcpy(staged, from, part);
    check_cuda(cudaMemcpyAsync(to, staged, part, cudaMemcpyHostToDevice, stream_),
               "cudaMemcpyAsync");
    used_ += part;
    to += part;
    from += part;
    num_bytes -= part;
  }
}

void StagedUpload::next_buffer() {
  Buffer& full = buffers_[current_];
  check_cuda(cudaEventRecord(full.drained.get(), stream_), "cudaEventRecord");
  full.recorded = true;
  current_ = (current_ + 1) % buffers_.size();
  used_ = 0;
  const Buffer& next = buffers_[current_];
  if (next.recorded) {
    check_cuda(cudaEventSynchronize(next.drained.get()), "cudaEventSynchronize");
  }
}

}  // namespace deltaflash::cuda
