#pragma once

#include <cuda_runtime_api.h>

#include <utility>

#include "plugins/common/cuda_error.h"

namespace deltaflash::cuda {

/// Owns a handle of a CUDA library; a failure of kDestroy goes unheard.
template <typename Handle, auto kDestroy>
class Owned {
 public:
  Owned() = default;
  explicit Owned(Handle handle) : handle_(handle) {}
  Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, Handle{})) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Owned() {
    if (handle_ != Handle{}) {
      static_cast<void>(kDestroy(handle_));
    }
  }

  Handle get() const { return handle_; }

 private:
  Handle handle_ = {};
};

using OwnedStream = Owned<cudaStream_t, cudaStreamDestroy>;
using OwnedEvent = Owned<cudaEvent_t, cudaEventDestroy>;
using OwnedGraph = Owned<cudaGraph_t, cudaGraphDestroy>;
using OwnedGraphExec = Owned<cudaGraphExec_t, cudaGraphExecDestroy>;

/// Does not wait for the work of other streams, the legacy default stream included.
inline OwnedStream make_stream() {
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
             "cudaStreamCreateWithFlags");
  return OwnedStream(stream);
}

inline OwnedEvent make_event() {
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return OwnedEvent(event);
}

}  // namespace deltaflash::cuda
