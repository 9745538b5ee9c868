#include "plugins/common/cuda_error.h"
#include "plugins/common/cuda_launch.h"
#include "plugins/common/reduce.cuh"
#include "plugins/rms_norm/rms_norm.h"

namespace deltaflash::cuda {
namespace {

constexpr int kThreads = 256;

// One CTA per token. `out` may be `x`: a thread reads and writes the same elements.
__global__ void __launch_bounds__(kThreads)
    rms_norm_kernel(const float* x, float* residual, const float* __restrict__ weight, float* out,
                    std::int64_t dim, float eps, float offset) {
  const std::int64_t token = blockIdx.x;
  x += token * dim;
  out += token * dim;
  const float* sum = x;
  float squares = 0.0f;
  if (residual != nullptr) {
    residual += token * dim;
    for (std::int64_t i = threadIdx.x; i < dim; i += kThreads) {
      const float r = residual[i] + x[i];
      residual[i] = r;
      squares += r * r;
    }
    sum = residual;
  } else {
    for (std::int64_t i = threadIdx.x; i < dim; i += kThreads) {
      const float r = x[i];
      squares += r * r;
    }
  }
  const float mean = block_sum<kThreads>(squares) / static_cast<float>(dim);
  const float inv_rms = 1.0f / sqrtf(mean + eps);
  for (std::int64_t i = threadIdx.x; i < dim; i += kThreads) {
    out[i] = sum[i] * inv_rms * (weight[i] + offset);
  }
}

}  // namespace

void rms_norm(const RmsNorm& args, Stream stream) {
  require_float32(args.dtype, "rms_norm");
  require_positive(args.dim, "rms_norm", "dim");
  if (args.num_tokens == 0) {
    return;
  }
  rms_norm_kernel<<<grid_x(args.num_tokens, "rms_norm"), kThreads, 0, cuda_stream(stream)>>>(
      static_cast<const float*>(args.x), static_cast<float*>(args.residual), args.weight,
      static_cast<float*>(args.out), args.dim, args.eps, args.unit_offset ? 1.0f : 0.0f);
  check_cuda(cudaGetLastError(), "rms_norm");
}

}  // namespace deltaflash::cuda
