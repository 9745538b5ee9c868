#pragma once

#include <memory>

#include "runtime/src/cuda_device.h"

namespace deltaflash {

/// Opens `libdeltaflash_cuda`, which lies beside the native module where it was built with nvcc,
/// and makes its device.
/// Throws EngineError without the library or for an unknown provider, CudaError without a GPU.
std::unique_ptr<Device> open_cuda_device(const CudaOptions& options);

}  // namespace deltaflash
