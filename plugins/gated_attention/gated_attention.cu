#include "plugins/common/cuda_error.h"
#include "plugins/common/cuda_launch.h"
#include "plugins/common/dispatch.h"
#include "plugins/common/reduce.cuh"
#include "plugins/common/row_batch.cuh"
#include "plugins/gated_attention/gated_attention.h"

namespace deltaflash::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kTile = 64;     // keys of a tile; tile n starts at kv index n * kTile
constexpr int kDotLanes = 8;  // lanes that share the dot products of one key
constexpr int kKeyGroups = kThreads / kDotLanes;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxHeads = 8;  // query heads of a CTA, all of the same kv head
static_assert(kTile == 2 * kWarpSize && kTile % kKeyGroups == 0 && kMaxHeads <= kWarps);

// Where a key of a slot begins, in elements; -1 where no page is held.
__device__ __forceinline__ std::int64_t key_offset(const PagedKv& kv, std::int64_t slot,
                                                   std::int64_t kv_head, std::uint32_t index) {
  const auto page_size = static_cast<std::uint32_t>(kv.page_size);
  const std::uint32_t page_index = index / page_size;
  if (page_index >= kv.max_pages) {
    return -1;
  }
  const std::int64_t page = kv.page_table[slot * kv.max_pages + page_index];
  const std::int64_t row = index - page_index * page_size;
  return page < 0 ? -1 : ((page * kv.num_kv_heads + kv_head) * kv.page_size + row) * kv.head_dim;
}

// One CTA per token, kv head and group of up to kHeads of its query heads. kChunks 32-dim chunks
// cover head_dim. The order of every sum depends on the kv index alone.
template <int kHeads, int kChunks>
__global__ void __launch_bounds__(kThreads)
    gated_attention_kernel(const __grid_constant__ GatedAttention args, int ratio, int groups) {
  __shared__ alignas(16) float queries[kHeads * kChunks * 32];
  __shared__ alignas(16) float weights[kTile * kHeads];  // scores, then exp(score - max)
  __shared__ float merged[kThreads * kHeads];
  __shared__ std::int64_t offsets[2][kTile];
  __shared__ float factors[kHeads];  // what a new maximum multiplies the old sums by
  __shared__ float inv_sums[kHeads];

  const PagedKv& kv = args.kv;
  const int head_dim = static_cast<int>(kv.head_dim);
  const int group = static_cast<int>(blockIdx.x % groups);
  const std::int64_t kv_head = blockIdx.x / groups % kv.num_kv_heads;
  const std::int64_t token = blockIdx.x / groups / kv.num_kv_heads;
  const std::int64_t first_head = kv_head * ratio + group * kHeads;
  const int num_heads = min(kHeads, ratio - group * kHeads);

  const std::int64_t row = row_of_token(args.rows.row_start, args.rows.num_rows, token);
  if (row < 0) {
    return;
  }
  float* out = static_cast<float*>(args.out) + (token * args.num_heads + first_head) * kv.head_dim;
  const std::int64_t slot = args.rows.slots[row];
  const int tid = static_cast<int>(threadIdx.x);
  if (slot < 0) {
    for (int i = tid; i < num_heads * head_dim; i += kThreads) {
      out[i] = 0.0f;
    }
    return;
  }
  const int visible =
      static_cast<int>(args.table[slot].kv_len + (token - args.rows.row_start[row]) + 1);

  const float* q =
      static_cast<const float*>(args.q) + (token * args.num_heads + first_head) * kv.head_dim;
  for (int i = tid; i < num_heads * head_dim; i += kThreads) {
    queries[i / head_dim * (kChunks * 32) + i % head_dim] = q[i];
  }
  if (tid < kTile) {
    offsets[0][tid] = tid < visible ? key_offset(kv, slot, kv_head, tid) : -1;
  }

  const int warp = tid / kWarpSize;
  const int lane = tid % kWarpSize;
  const int dot_lane = tid % kDotLanes;
  const int key_group = tid / kDotLanes;
  const int value_groups = kThreads / head_dim;  // threads that share the keys of one dim
  const int value_group = tid / head_dim;
  const int dim = tid % head_dim;
  const auto* keys = static_cast<const float*>(kv.keys);
  const auto* values = static_cast<const float*>(kv.values);

  float acc[kHeads] = {};
  float highest = -INFINITY;  // of head `warp`
  float sum = 0.0f;           // of head `warp`
  __syncthreads();

  for (int first = 0, parity = 0; first < visible; first += kTile, parity ^= 1) {
    const int count = min(kTile, visible - first);
    const std::int64_t* tile = offsets[parity];
#pragma unroll
    for (int n = 0; n < kTile / kKeyGroups; ++n) {
      const int j = n * kKeyGroups + key_group;
      const std::int64_t offset = tile[j];  // -1 behind the last visible key, too
      float scores[kHeads] = {};
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int at = c * 32 + dot_lane * 4;
        if (at < head_dim) {
          const float4 k = offset < 0 ? make_float4(0.0f, 0.0f, 0.0f, 0.0f)
                                      : *reinterpret_cast<const float4*>(keys + offset + at);
#pragma unroll
          for (int h = 0; h < kHeads; ++h) {
            if (h < num_heads) {
              const float4 x = *reinterpret_cast<const float4*>(queries + h * kChunks * 32 + at);
              scores[h] = fmaf(x.x, k.x, scores[h]);
              scores[h] = fmaf(x.y, k.y, scores[h]);
              scores[h] = fmaf(x.z, k.z, scores[h]);
              scores[h] = fmaf(x.w, k.w, scores[h]);
            }
          }
        }
      }
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        scores[h] = lanes_sum<kDotLanes>(scores[h]);
        if (dot_lane == 0) {
          weights[j * kHeads + h] = offset < 0 ? -INFINITY : scores[h] * args.scale;
        }
      }
    }
    if (tid < kTile) {
      const int next = first + kTile + tid;
      offsets[parity ^ 1][tid] = next < visible ? key_offset(kv, slot, kv_head, next) : -1;
    }
    __syncthreads();

    if (warp < num_heads) {
      float* low = weights + lane * kHeads + warp;
      float* high = low + kWarpSize * kHeads;
      const float top = fmaxf(highest, warp_max(fmaxf(*low, *high)));
      // Nothing to see yet: any finite maximum makes all weights zero.
      const float shift = top == -INFINITY ? 0.0f : top;
      const float factor = expf(highest - shift);
      *low = expf(*low - shift);
      *high = expf(*high - shift);
      sum = sum * factor + warp_sum(*low + *high);
      highest = top;
      if (lane == 0) {
        factors[warp] = factor;
      }
    }
    __syncthreads();

    if (value_group < value_groups) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        acc[h] *= h < num_heads ? factors[h] : 0.0f;
      }
#pragma unroll 8
      for (int j = value_group; j < count; j += value_groups) {
        const std::int64_t offset = tile[j];
        const float v = offset < 0 ? 0.0f : values[offset + dim];
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          acc[h] = fmaf(weights[j * kHeads + h], v, acc[h]);
        }
      }
    }
    __syncthreads();
  }

  if (warp < num_heads && lane == 0) {
    inv_sums[warp] = sum == 0.0f ? 0.0f : 1.0f / sum;
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    merged[h * kThreads + tid] = acc[h];
  }
  __syncthreads();
  const float* gate = static_cast<const float*>(args.gate) + token * args.gate_stride +
                      first_head * args.gate_head_stride;
  for (int i = tid; i < num_heads * head_dim; i += kThreads) {
    const int h = i / head_dim;
    const int d = i % head_dim;
    float total = 0.0f;
    for (int part = 0; part < value_groups; ++part) {
      total += merged[h * kThreads + part * head_dim + d];
    }
    const float open = 1.0f / (1.0f + expf(-gate[h * args.gate_head_stride + d]));
    out[i] = total * inv_sums[h] * open;
  }
}

void check(const GatedAttention& args) {
  require_float32(args.dtype, "gated_attention");
  require_float32(args.kv.dtype, "gated_attention");
  require_positive(args.kv.page_size, "gated_attention", "page_size");
  if (args.kv.head_dim <= 0 || args.kv.head_dim % 8 != 0 || args.kv.head_dim > kMaxHeadDim) {
    throw std::invalid_argument(
        "gated_attention: expected head_dim to be a multiple of 8 up to 256, got " +
        std::to_string(args.kv.head_dim));
  }
  if (args.kv.num_kv_heads <= 0 || args.num_heads <= 0 ||
      args.num_heads % args.kv.num_kv_heads != 0) {
    throw std::invalid_argument("gated_attention: expected num_heads to be a multiple of " +
                                std::to_string(args.kv.num_kv_heads) + " kv heads, got " +
                                std::to_string(args.num_heads));
  }
}

template <int kHeads, int kChunks>
void launch(const GatedAttention& args, Stream stream) {
  const std::int64_t ratio = args.num_heads / args.kv.num_kv_heads;
  const std::int64_t groups = ceil_div(ratio, kHeads);
  const unsigned grid =
      grid_x(args.rows.num_tokens * args.kv.num_kv_heads * groups, "gated_attention");
  gated_attention_kernel<kHeads, kChunks><<<grid, kThreads, 0, cuda_stream(stream)>>>(
      args, static_cast<int>(ratio), static_cast<int>(groups));
  check_cuda(cudaGetLastError(), "gated_attention");
}

}  // namespace

void gated_attention(const GatedAttention& args, Stream stream) {
  check(args);
  if (args.rows.num_rows == 0 || args.rows.num_tokens == 0) {
    return;
  }
  dispatch_at_least<1, 2, 4, kMaxHeads>(args.num_heads / args.kv.num_kv_heads, [&](auto heads) {
    dispatch_at_least<1, 2, 4, 8>(ceil_div(args.kv.head_dim, 32), [&](auto chunks) {
      launch<heads.value, chunks.value>(args, stream);
    });
  });
}

}  // namespace deltaflash::cuda
