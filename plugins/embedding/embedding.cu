#include "plugins/common/cuda_error.h"
#include "plugins/common/cuda_launch.h"
#include "plugins/embedding/embedding.h"

namespace deltaflash::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float widen(std::uint32_t bits) { return __uint_as_float(bits << 16); }

// One CTA per token.
__global__ void __launch_bounds__(kThreads)
    embedding_kernel(const std::int32_t* __restrict__ ids, const std::uint16_t* __restrict__ table,
                     float* __restrict__ out, std::int64_t vocab_size, std::int64_t hidden) {
  const std::int64_t token = blockIdx.x;
  const std::int64_t id = ids[token];
  const bool known = id >= 0 && id < vocab_size;
  const std::uint16_t* from = table + (known ? id : 0) * hidden;
  float* to = out + token * hidden;
  if (hidden % 4 == 0) {
    for (std::int64_t i = threadIdx.x * 4; i < hidden; i += kThreads * 4) {
      const ushort4 bits =
          known ? *reinterpret_cast<const ushort4*>(from + i) : make_ushort4(0, 0, 0, 0);
      *reinterpret_cast<float4*>(to + i) =
          make_float4(widen(bits.x), widen(bits.y), widen(bits.z), widen(bits.w));
    }
    return;
  }
  for (std::int64_t i = threadIdx.x; i < hidden; i += kThreads) {
    to[i] = known ? widen(from[i]) : 0.0f;
  }
}

}  // namespace

void embedding(const Embedding& args, Stream stream) {
  require_float32(args.dtype, "embedding");
  require_positive(args.hidden, "embedding", "hidden");
  if (args.num_tokens == 0) {
    return;
  }
  embedding_kernel<<<grid_x(args.num_tokens, "embedding"), kThreads, 0, cuda_stream(stream)>>>(
      args.ids, reinterpret_cast<const std::uint16_t*>(args.table), static_cast<float*>(args.out),
      args.vocab_size, args.hidden);
  check_cuda(cudaGetLastError(), "embedding");
}

}  // namespace deltaflash::cuda
