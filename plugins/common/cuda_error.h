#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "plugins/common/error.h"

namespace deltaflash {

/// Throws CudaError naming `what`, the op or call that returned `status`, unless it succeeded.
inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw CudaError(std::string(what) + ": " + cudaGetErrorString(status) + " (" +
                    cudaGetErrorName(status) + ")");
  }
}

}  // namespace deltaflash
