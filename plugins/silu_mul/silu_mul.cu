#include "plugins/common/cuda_error.h"
#include "plugins/common/cuda_launch.h"
#include "plugins/silu_mul/silu_mul.h"

namespace deltaflash::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVec = 4;  // 4 x 32 bit: one 16-byte load

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// One CTA per token and stretch of kThreads * kVec columns.
__global__ void __launch_bounds__(kThreads)
    silu_mul_kernel(const float* __restrict__ gate_up, float* __restrict__ out, std::int64_t dim,
                    unsigned blocks_per_token) {
  const std::int64_t token = blockIdx.x / blocks_per_token;
  const std::int64_t begin =
      static_cast<std::int64_t>(blockIdx.x % blocks_per_token) * kThreads * kVec;
  const float* gate = gate_up + token * 2 * dim;
  const float* up = gate + dim;
  out += token * dim;
  if (dim % kVec == 0) {
    const std::int64_t i = begin + threadIdx.x * kVec;
    if (i < dim) {
      const float4 g = *reinterpret_cast<const float4*>(gate + i);
      const float4 u = *reinterpret_cast<const float4*>(up + i);
      *reinterpret_cast<float4*>(out + i) =
          make_float4(silu(g.x) * u.x, silu(g.y) * u.y, silu(g.z) * u.z, silu(g.w) * u.w);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    const std::int64_t i = begin + j * kThreads + threadIdx.x;
    if (i < dim) {
      out[i] = silu(gate[i]) * up[i];
    }
  }
}

}  // namespace

void silu_mul(const SiluMul& args, Stream stream) {
  require_float32(args.dtype, "silu_mul");
  require_positive(args.dim, "silu_mul", "dim");
  if (args.num_tokens == 0) {
    return;
  }
  const std::int64_t blocks_per_token = ceil_div(args.dim, kThreads * kVec);
  silu_mul_kernel<<<grid_x(args.num_tokens * blocks_per_token, "silu_mul"), kThreads, 0,
                    cuda_stream(stream)>>>(static_cast<const float*>(args.gate_up),
                                           static_cast<float*>(args.out), args.dim,
                                           static_cast<unsigned>(blocks_per_token));
  check_cuda(cudaGetLastError(), "silu_mul");
}

}  // namespace deltaflash::cuda
