#pragma once

namespace deltaflash {

/// Where an op is enqueued. Opaque, so that a CUDA-free build compiles every header: it holds a
/// `cudaStream_t` on the CUDA backend and a `ThreadPool*` on the CPU backend, where launches run
/// to their end before they return and a null handle means the calling thread.
struct Stream {
  void* handle = nullptr;
};

}  // namespace deltaflash
