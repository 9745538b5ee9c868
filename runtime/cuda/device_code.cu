#include "plugins/common/cuda_error.h"
#include "runtime/cuda/device_code.h"

namespace deltaflash::cuda {
namespace {

// Compiled for the same architectures as all kernels; never launched.
__global__ void probe_kernel() {}

}  // namespace

bool has_device_code() {
  cudaFuncAttributes attributes = {};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, probe_kernel);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    static_cast<void>(cudaGetLastError());  // answered, so it must not surface at the next check
    return false;
  }
  check_cuda(status, "cudaFuncGetAttributes");
  return true;
}

}  // namespace deltaflash::cuda
