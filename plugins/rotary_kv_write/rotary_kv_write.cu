#include "plugins/common/cuda_error.h"
#include "plugins/common/cuda_launch.h"
#include "plugins/common/reduce.cuh"
#include "plugins/common/row_batch.cuh"
#include "plugins/rotary_kv_write/rotary_kv_write.h"

namespace deltaflash::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

__device__ __forceinline__ int axis_of(int frequency, const std::int32_t (&section)[3]) {
  if (frequency % 3 == 1 && frequency < 3 * section[1]) {
    return 1;
  }
  if (frequency % 3 == 2 && frequency < 3 * section[2]) {
    return 2;
  }
  return 0;
}

// RMSNorm of one head, then the rotation of its first 2 * half dims, by one warp. cos_sin holds the
// cosines, then the sines.
__device__ void norm_rotate_head(const float* __restrict__ x, const float* __restrict__ weight,
                                 const float* cos_sin, float* __restrict__ out, int head_dim,
                                 int half, float eps) {
  const int lane = threadIdx.x % kWarpSize;
  float squares = 0.0f;
  for (int i = lane; i < head_dim; i += kWarpSize) {
    squares += x[i] * x[i];
  }
  const float inv_rms = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(head_dim) + eps);
  const auto normed = [&](int i) { return x[i] * inv_rms * (weight[i] + 1.0f); };
  for (int i = lane; i < head_dim; i += kWarpSize) {
    float value = normed(i);
    if (i < half) {
      value = value * cos_sin[i] - normed(i + half) * cos_sin[half + i];
    } else if (i < 2 * half) {
      value = value * cos_sin[i - half] + normed(i - half) * cos_sin[i];
    }
    out[i] = value;
  }
}

// One CTA per token, one warp per head in turn.
__global__ void __launch_bounds__(kThreads)
    rotary_kv_write_kernel(const __grid_constant__ RotaryKvWrite args) {
  extern __shared__ float cos_sin[];  // [2, rotary_dim / 2]
  const std::int64_t token = blockIdx.x;
  const std::int64_t row = row_of_token(args.rows.row_start, args.rows.num_rows, token);
  const std::int64_t slot = row < 0 ? -1 : args.rows.slots[row];
  if (slot < 0) {
    return;
  }
  const PagedKv& kv = args.kv;
  const int head_dim = static_cast<int>(kv.head_dim);
  const int half = static_cast<int>(args.rotary_dim / 2);
  for (int j = threadIdx.x; j < half; j += kThreads) {
    const std::int32_t position =
        args.positions[axis_of(j, args.section) * args.rows.num_tokens + token];
    float sine = 0.0f;
    float cosine = 0.0f;
    sincosf(static_cast<float>(position) * args.inv_freq[j], &sine, &cosine);
    cos_sin[j] = cosine * args.attention_factor;
    cos_sin[half + j] = sine * args.attention_factor;
  }
  __syncthreads();

  const int num_heads = static_cast<int>(args.num_heads);
  const int num_kv_heads = static_cast<int>(kv.num_kv_heads);
  const float* q = static_cast<const float*>(args.qkv) + token * args.qkv_stride;
  const float* k = q + 2 * args.num_heads * kv.head_dim;
  const float* v = k + kv.num_kv_heads * kv.head_dim;
  float* q_out = static_cast<float*>(args.q_out) + token * args.num_heads * kv.head_dim;
  const int warp = threadIdx.x / kWarpSize;
  for (int head = warp; head < num_heads; head += kWarps) {
    norm_rotate_head(q + 2 * head * head_dim, args.q_norm, cos_sin, q_out + head * head_dim,
                     head_dim, half, args.eps);
  }

  const std::int64_t index = args.table[slot].kv_len + (token - args.rows.row_start[row]);
  if (index < 0 || index / kv.page_size >= kv.max_pages) {
    return;
  }
  const std::int64_t page = kv.page_table[slot * kv.max_pages + index / kv.page_size];
  if (page < 0) {
    return;
  }
  for (int head = warp; head < num_kv_heads; head += kWarps) {
    const std::int64_t to =
        ((page * kv.num_kv_heads + head) * kv.page_size + index % kv.page_size) * kv.head_dim;
    norm_rotate_head(k + head * head_dim, args.k_norm, cos_sin, static_cast<float*>(kv.keys) + to,
                     head_dim, half, args.eps);
    for (int i = threadIdx.x % kWarpSize; i < head_dim; i += kWarpSize) {
      static_cast<float*>(kv.values)[to + i] = v[head * head_dim + i];
    }
  }
}

void check(const RotaryKvWrite& args) {
  require_float32(args.dtype, "rotary_kv_write");
  require_float32(args.kv.dtype, "rotary_kv_write");
  require_positive(args.kv.head_dim, "rotary_kv_write", "head_dim");
  require_positive(args.kv.page_size, "rotary_kv_write", "page_size");
  if (args.rotary_dim < 0 || args.rotary_dim % 2 != 0 || args.rotary_dim > args.kv.head_dim) {
    throw std::invalid_argument("rotary_kv_write: expected an even rotary_dim in [0, " +
                                std::to_string(args.kv.head_dim) + "], got " +
                                std::to_string(args.rotary_dim));
  }
  const std::int64_t frequencies =
      std::int64_t{args.section[0]} + args.section[1] + args.section[2];
  if (frequencies != args.rotary_dim / 2) {
    throw std::invalid_argument("rotary_kv_write: expected sections that sum to " +
                                std::to_string(args.rotary_dim / 2) + ", got " +
                                std::to_string(frequencies));
  }
}

}  // namespace

void rotary_kv_write(const RotaryKvWrite& args, Stream stream) {
  check(args);
  if (args.rows.num_rows == 0 || args.rows.num_tokens == 0) {
    return;
  }
  const auto shared_bytes = static_cast<std::size_t>(args.rotary_dim) * sizeof(float);
  rotary_kv_write_kernel<<<grid_x(args.rows.num_tokens, "rotary_kv_write"), kThreads, shared_bytes,
                           cuda_stream(stream)>>>(args);
  check_cuda(cudaGetLastError(), "rotary_kv_write");
}

}  // namespace deltaflash::cuda
