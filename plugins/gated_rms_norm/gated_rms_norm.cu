#include "plugins/common/cuda_error.h"
#include "plugins/common/cuda_launch.h"
#include "plugins/common/reduce.cuh"
#include "plugins/gated_rms_norm/gated_rms_norm.h"

namespace deltaflash::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeadsPerBlock = kThreads / kWarpSize;

// One warp per token and head. `out` may be `x`: a lane reads and writes the same elements.
__global__ void __launch_bounds__(kThreads)
    gated_rms_norm_kernel(const float* x, const float* __restrict__ z, std::int64_t z_stride,
                          const float* __restrict__ weight, float* out, std::int64_t num_tokens,
                          std::int64_t num_heads, std::int64_t head_dim, float eps) {
  const std::int64_t head =
      static_cast<std::int64_t>(blockIdx.x) * kHeadsPerBlock + threadIdx.x / kWarpSize;
  if (head >= num_tokens * num_heads) {
    return;
  }
  const int lane = threadIdx.x % kWarpSize;
  const std::int64_t token = head / num_heads;
  x += head * head_dim;
  z += token * z_stride + (head - token * num_heads) * head_dim;
  out += head * head_dim;
  float squares = 0.0f;
  for (std::int64_t i = lane; i < head_dim; i += kWarpSize) {
    squares += x[i] * x[i];
  }
  const float mean = warp_sum(squares) / static_cast<float>(head_dim);
  const float inv_rms = 1.0f / sqrtf(mean + eps);
  for (std::int64_t i = lane; i < head_dim; i += kWarpSize) {
    const float gate = z[i] / (1.0f + expf(-z[i]));
    out[i] = x[i] * inv_rms * weight[i] * gate;
  }
}

}  // namespace

void gated_rms_norm(const GatedRmsNorm& args, Stream stream) {
  require_float32(args.dtype, "gated_rms_norm");
  require_positive(args.num_heads, "gated_rms_norm", "num_heads");
  require_positive(args.head_dim, "gated_rms_norm", "head_dim");
  if (args.z_stride < args.num_heads * args.head_dim) {
    throw std::invalid_argument(
        "gated_rms_norm: expected z_stride >= " + std::to_string(args.num_heads * args.head_dim) +
        ", got " + std::to_string(args.z_stride));
  }
  if (args.num_tokens == 0) {
    return;
  }
  const unsigned grid =
      grid_x(ceil_div(args.num_tokens * args.num_heads, kHeadsPerBlock), "gated_rms_norm");
  gated_rms_norm_kernel<<<grid, kThreads, 0, cuda_stream(stream)>>>(
      static_cast<const float*>(args.x), static_cast<const float*>(args.z), args.z_stride,
      args.weight, static_cast<float*>(args.out), args.num_tokens, args.num_heads, args.head_dim,
      args.eps);
  check_cuda(cudaGetLastError(), "gated_rms_norm");
}

}  // namespace deltaflash::cuda
