#include <cuda_bf16.h>

#include "plugins/common/cuda_error.h"
#include "plugins/common/cuda_launch.h"
#include "runtime/cuda/to_bfloat16.h"

namespace deltaflash::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVec = 4;  // 4 x 32 bit: one 16-byte load

__global__ void __launch_bounds__(kThreads)
    to_bfloat16_kernel(const float* __restrict__ x, __nv_bfloat16* __restrict__ out,
                       std::int64_t count) {
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVec;
  if (i + kVec <= count) {
    const float4 four = *reinterpret_cast<const float4*>(x + i);
    auto* to = reinterpret_cast<__nv_bfloat162*>(out + i);
    to[0] = __floats2bfloat162_rn(four.x, four.y);
    to[1] = __floats2bfloat162_rn(four.z, four.w);
    return;
  }
  for (std::int64_t rest = i; rest < count; ++rest) {
    out[rest] = __float2bfloat16_rn(x[rest]);
  }
}

}  // namespace

void to_bfloat16(const float* x, BFloat16* out, std::int64_t count, Stream stream) {
  if (count == 0) {
    return;
  }
  to_bfloat16_kernel<<<grid_x(ceil_div(count, kThreads * kVec), "to_bfloat16"), kThreads, 0,
                       cuda_stream(stream)>>>(x, reinterpret_cast<__nv_bfloat16*>(out), count);
  check_cuda(cudaGetLastError(), "to_bfloat16");
}

}  // namespace deltaflash::cuda
