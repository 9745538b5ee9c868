#pragma once

#include <cstdint>
#include <string>

#include "runtime/src/device.h"

namespace deltaflash {

/// How the CUDA backend is set up. Shared by the library and by the host that opens it.
struct CudaOptions {
  std::string provider;     // `cublaslt`, or `exact`: own kernels, batch-invariant
  std::int64_t max_tokens;  // rows that a segment is launched with at most
};

/// The type of `deltaflash_make_cuda_device`, for a host that looks it up by kMakeCudaDevice.
using MakeCudaDevice = Device* (*)(const CudaOptions*);
constexpr const char* kMakeCudaDevice = "deltaflash_make_cuda_device";

}  // namespace deltaflash

/// A device on the current GPU; the caller deletes it. The one symbol of `libdeltaflash_cuda`.
/// Throws CudaError where no GPU can be used, EngineError for an unknown provider: host and library
/// come from one toolchain, so exceptions cross.
extern "C" __attribute__((visibility("default"))) deltaflash::Device* deltaflash_make_cuda_device(
    const deltaflash::CudaOptions* options);
