#include <bit>

#include "plugins/common/cuda_error.h"
#include "plugins/common/cuda_launch.h"
#include "plugins/common/dispatch.h"
#include "plugins/common/reduce.cuh"
#include "plugins/gated_delta_net/gated_delta_net.h"

// Both kernels run the recurrence token by token with the state in registers. A ring record is
// replayed by the very operations that made it, S <- alpha S, then S <- S + d k^T, on the same
// fp32 numbers: states and outputs have the same bits however a sequence is cut into prefill
// chunks, verify rows, rejected drafts and flushes.

namespace deltaflash::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kLanes = 8;          // lanes that share a state row
constexpr int kRowsPerThread = 2;  // state rows of a thread
constexpr int kRowGroups = kThreads / kLanes;
constexpr int kTileRows = kRowGroups * kRowsPerThread;  // state rows, i.e. value dims, of a CTA
constexpr int kSteps = 16;                              // tokens or records staged at a time
constexpr float kNormEps = 1e-6f;

// CTAs that share an SM: bounds what the compiler may spend on registers.
constexpr int min_blocks(int keys) { return keys <= 128 ? 4 : 2; }

// Tokens or records in shared memory. Keys and queries are padded with zeros to kKeys.
template <int kKeys>
struct Stage {
  alignas(16) float k[kSteps][kKeys];
  alignas(16) float q[kSteps][kKeys];
  float v[kSteps][kTileRows];
  float d[kSteps][kTileRows];
  float out[kSteps][kTileRows];
  float g[kSteps];
  float alpha[kSteps];
  float beta[kSteps];
};

// What a CTA works on: a row of the batch, a value head and kTileRows of its value dims.
struct Work {
  std::int64_t slot;
  std::int64_t begin;  // the row's first token in the packed buffers
  std::int64_t length;
  std::int64_t tile;
  std::int64_t first_dim;  // of the tile
  std::int64_t value_head;
  std::int64_t key_head;
  bool first_of_group;  // the value head that writes the keys its group shares
};

__device__ __forceinline__ Work work_of_block(const GatedDeltaNet& args, std::int64_t tiles) {
  Work work;
  work.tile = blockIdx.x % tiles;
  work.first_dim = work.tile * kTileRows;
  work.value_head = blockIdx.x / tiles % args.num_value_heads;
  const std::int64_t row = blockIdx.x / tiles / args.num_value_heads;
  work.slot = args.rows.slots[row];
  work.begin = args.rows.row_start[row];
  work.length = args.rows.row_start[row + 1] - work.begin;
  const std::int64_t ratio = args.num_value_heads / args.num_key_heads;
  work.key_head = work.value_head / ratio;
  work.first_of_group = work.value_head % ratio == 0;
  return work;
}

__device__ void zero_outputs(const GatedDeltaNet& args, const Work& work) {
  auto* out = static_cast<float*>(args.out);
  for (std::int64_t i = threadIdx.x; i < work.length * kTileRows; i += kThreads) {
    const std::int64_t dim = work.first_dim + i % kTileRows;
    if (dim < args.value_dim) {
      out[((work.begin + i / kTileRows) * args.num_value_heads + work.value_head) * args.value_dim +
          dim] = 0.0f;
    }
  }
}

// A thread's share of the state tile: rows r * kRowGroups + its row group, keys 32 * c +
// 4 * (its lane among kLanes) + j. Dims and keys beyond the head's are zero.
template <int kKeys>
struct StateTile {
  static constexpr int kChunks = kKeys / 32;
  float at[kRowsPerThread][kChunks][4];

  __device__ static int row(int r) { return r * kRowGroups + threadIdx.x / kLanes; }
  __device__ static int key(int c) { return c * 32 + threadIdx.x % kLanes * 4; }

  __device__ void clear() {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          at[r][c][j] = 0.0f;
        }
      }
    }
  }

  // `state` is the head's, [value_dim, key_dim].
  __device__ void load(const float* state, const Work& work, const GatedDeltaNet& args) {
    clear();
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const std::int64_t dim = work.first_dim + row(r);
      if (dim >= args.value_dim) {
        continue;
      }
      const float* from = state + dim * args.key_dim;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (args.key_dim % 4 == 0) {
          if (key(c) < args.key_dim) {
            const float4 four = *reinterpret_cast<const float4*>(from + key(c));
            at[r][c][0] = four.x;
            at[r][c][1] = four.y;
            at[r][c][2] = four.z;
            at[r][c][3] = four.w;
          }
          continue;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          at[r][c][j] = key(c) + j < args.key_dim ? from[key(c) + j] : 0.0f;
        }
      }
    }
  }

  __device__ void store(float* state, const Work& work, const GatedDeltaNet& args) const {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const std::int64_t dim = work.first_dim + row(r);
      if (dim >= args.value_dim) {
        continue;
      }
      float* to = state + dim * args.key_dim;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (args.key_dim % 4 == 0) {
          if (key(c) < args.key_dim) {
            *reinterpret_cast<float4*>(to + key(c)) =
                make_float4(at[r][c][0], at[r][c][1], at[r][c][2], at[r][c][3]);
          }
          continue;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (key(c) + j < args.key_dim) {
            to[key(c) + j] = at[r][c][j];
          }
        }
      }
    }
  }

  // S <- alpha S, S <- S + d k^T for the first `count` records of the stage.
  __device__ void replay(const Stage<kKeys>& stage, int count) {
    for (int m = 0; m < count; ++m) {
      const float alpha = stage.alpha[m];
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const float4 k = *reinterpret_cast<const float4*>(&stage.k[m][key(c)]);
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
          const float d = stage.d[m][row(r)];
          float (&s)[4] = at[r][c];
          s[0] = __fmaf_rn(d, k.x, __fmul_rn(alpha, s[0]));
          s[1] = __fmaf_rn(d, k.y, __fmul_rn(alpha, s[1]));
          s[2] = __fmaf_rn(d, k.z, __fmul_rn(alpha, s[2]));
          s[3] = __fmaf_rn(d, k.w, __fmul_rn(alpha, s[3]));
        }
      }
    }
  }

  // The recurrence over the first `count` tokens of the stage; fills its d and out.
  __device__ void run(Stage<kKeys>& stage, int count) {
    const bool writes = threadIdx.x % kLanes == 0;
    for (int t = 0; t < count; ++t) {
      const float alpha = stage.alpha[t];
      float dot[kRowsPerThread][4] = {};
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const float4 k = *reinterpret_cast<const float4*>(&stage.k[t][key(c)]);
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
          float (&s)[4] = at[r][c];
          s[0] = __fmul_rn(alpha, s[0]);
          s[1] = __fmul_rn(alpha, s[1]);
          s[2] = __fmul_rn(alpha, s[2]);
          s[3] = __fmul_rn(alpha, s[3]);
          dot[r][0] = __fmaf_rn(s[0], k.x, dot[r][0]);
          dot[r][1] = __fmaf_rn(s[1], k.y, dot[r][1]);
          dot[r][2] = __fmaf_rn(s[2], k.z, dot[r][2]);
          dot[r][3] = __fmaf_rn(s[3], k.w, dot[r][3]);
        }
      }
      float d[kRowsPerThread];
#pragma unroll
      for (int r = 0; r < kRowsPerThread; ++r) {
        const float s_k = lanes_sum<kLanes>((dot[r][0] + dot[r][1]) + (dot[r][2] + dot[r][3]));
        d[r] = stage.beta[t] * (stage.v[t][row(r)] - s_k);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          dot[r][j] = 0.0f;
        }
      }
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const float4 k = *reinterpret_cast<const float4*>(&stage.k[t][key(c)]);
        const float4 q = *reinterpret_cast<const float4*>(&stage.q[t][key(c)]);
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
          float (&s)[4] = at[r][c];
          s[0] = __fmaf_rn(d[r], k.x, s[0]);
          s[1] = __fmaf_rn(d[r], k.y, s[1]);
          s[2] = __fmaf_rn(d[r], k.z, s[2]);
          s[3] = __fmaf_rn(d[r], k.w, s[3]);
          dot[r][0] = __fmaf_rn(s[0], q.x, dot[r][0]);
          dot[r][1] = __fmaf_rn(s[1], q.y, dot[r][1]);
          dot[r][2] = __fmaf_rn(s[2], q.z, dot[r][2]);
          dot[r][3] = __fmaf_rn(s[3], q.w, dot[r][3]);
        }
      }
#pragma unroll
      for (int r = 0; r < kRowsPerThread; ++r) {
        const float out = lanes_sum<kLanes>((dot[r][0] + dot[r][1]) + (dot[r][2] + dot[r][3]));
        if (writes) {
          stage.d[t][row(r)] = d[r];
          stage.out[t][row(r)] = out;
        }
      }
    }
  }
};

// Loads `count` tokens of the row from its token `first` on: normalises keys and queries, computes
// the gates.
template <int kKeys>
__device__ void stage_tokens(const GatedDeltaNet& args, const Work& work, std::int64_t first,
                             int count, Stage<kKeys>& stage) {
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const std::int64_t key_width = args.num_key_heads * args.key_dim;
  const float query_scale = 1.0f / sqrtf(static_cast<float>(args.key_dim));
  const float* qkv = static_cast<const float*>(args.qkv) + (work.begin + first) * args.qkv_stride;
  for (int x = warp; x < 2 * count; x += kWarps) {
    const bool is_key = x < count;
    const int t = is_key ? x : x - count;
    const float* from =
        qkv + t * args.qkv_stride + (is_key ? key_width : 0) + work.key_head * args.key_dim;
    float* to = is_key ? stage.k[t] : stage.q[t];
    float part[kKeys / kWarpSize];
    float squares = 0.0f;
#pragma unroll
    for (int n = 0; n < kKeys / kWarpSize; ++n) {
      const int i = n * kWarpSize + lane;
      part[n] = i < args.key_dim ? from[i] : 0.0f;
      squares = fmaf(part[n], part[n], squares);
    }
    const float factor = (is_key ? 1.0f : query_scale) / sqrtf(warp_sum(squares) + kNormEps);
#pragma unroll
    for (int n = 0; n < kKeys / kWarpSize; ++n) {
      to[n * kWarpSize + lane] = part[n] * factor;
    }
  }
  const float* v = qkv + 2 * key_width + work.value_head * args.value_dim + work.first_dim;
  for (int i = threadIdx.x; i < count * kTileRows; i += kThreads) {
    const int t = i / kTileRows;
    const int r = i % kTileRows;
    stage.v[t][r] = work.first_dim + r < args.value_dim ? v[t * args.qkv_stride + r] : 0.0f;
  }
  if (static_cast<int>(threadIdx.x) < count) {
    const int t = static_cast<int>(threadIdx.x);
    const float* ba =
        static_cast<const float*>(args.ba) + (work.begin + first + t) * args.ba_stride;
    const float a = ba[args.num_value_heads + work.value_head] + args.dt_bias[work.value_head];
    const float softplus = a > 20.0f ? a : log1pf(expf(a));
    stage.g[t] = -expf(args.a_log[work.value_head]) * softplus;
    stage.alpha[t] = expf(stage.g[t]);
    stage.beta[t] = 1.0f / (1.0f + expf(-ba[work.value_head]));
  }
}

template <int kKeys>
__device__ void store_outputs(const GatedDeltaNet& args, const Work& work, std::int64_t first,
                              int count, const Stage<kKeys>& stage) {
  auto* out = static_cast<float*>(args.out);
  for (int i = threadIdx.x; i < count * kTileRows; i += kThreads) {
    const int t = i / kTileRows;
    const int r = i % kTileRows;
    if (work.first_dim + r < args.value_dim) {
      out[((work.begin + first + t) * args.num_value_heads + work.value_head) * args.value_dim +
          work.first_dim + r] = stage.out[t][r];
    }
  }
}

// The operands of a value head in the pools.
struct Head {
  float* state;
  float* ring_d;
  float* ring_k;
  float* ring_g;
};

__device__ __forceinline__ Head head_of(const GatedDeltaNet& args, const Work& work) {
  const std::int64_t value_index = work.slot * args.num_value_heads + work.value_head;
  const std::int64_t key_index = work.slot * args.num_key_heads + work.key_head;
  return {args.state + value_index * args.value_dim * args.key_dim,
          static_cast<float*>(args.ring_d) + value_index * args.ring_rows * args.value_dim,
          static_cast<float*>(args.ring_k) + key_index * args.ring_rows * args.key_dim,
          args.ring_g + value_index * args.ring_rows};
}

// Loads the live records first .. first + count - 1.
template <int kKeys>
__device__ void stage_records(const GatedDeltaNet& args, const Work& work, const Head& head,
                              std::int64_t base, int count, Stage<kKeys>& stage) {
  const std::int64_t mask = args.ring_rows - 1;
  for (int i = threadIdx.x; i < count * kKeys; i += kThreads) {
    const int m = i / kKeys;
    const int key = i % kKeys;
    stage.k[m][key] =
        key < args.key_dim ? head.ring_k[((base + m) & mask) * args.key_dim + key] : 0.0f;
  }
  for (int i = threadIdx.x; i < count * kTileRows; i += kThreads) {
    const int m = i / kTileRows;
    const int r = i % kTileRows;
    stage.d[m][r] = work.first_dim + r < args.value_dim
                        ? head.ring_d[((base + m) & mask) * args.value_dim + work.first_dim + r]
                        : 0.0f;
  }
  if (static_cast<int>(threadIdx.x) < count) {
    stage.alpha[threadIdx.x] = expf(head.ring_g[(base + threadIdx.x) & mask]);
  }
}

// Writes the records of the staged tokens; the first goes to ring row `base`. The tiles of a head
// share g, its key group shares k: one CTA writes each.
template <int kKeys>
__device__ void append_records(const GatedDeltaNet& args, const Work& work, const Head& head,
                               std::int64_t base, int count, const Stage<kKeys>& stage) {
  const std::int64_t mask = args.ring_rows - 1;
  for (int i = threadIdx.x; i < count * kTileRows; i += kThreads) {
    const int t = i / kTileRows;
    const int r = i % kTileRows;
    if (work.first_dim + r < args.value_dim) {
      head.ring_d[((base + t) & mask) * args.value_dim + work.first_dim + r] = stage.d[t][r];
    }
  }
  if (work.tile != 0) {
    return;
  }
  if (static_cast<int>(threadIdx.x) < count) {
    head.ring_g[(base + threadIdx.x) & mask] = stage.g[threadIdx.x];
  }
  if (!work.first_of_group) {
    return;
  }
  for (int i = threadIdx.x; i < count * kKeys; i += kThreads) {
    const int t = i / kKeys;
    const int key = i % kKeys;
    if (key < args.key_dim) {
      head.ring_k[((base + t) & mask) * args.key_dim + key] = stage.k[t][key];
    }
  }
}

__device__ __forceinline__ int steps_left(std::int64_t count, std::int64_t done) {
  return static_cast<int>(count - done < kSteps ? count - done : kSteps);
}

// One CTA per row, value head and tile of value dims.
template <int kKeys>
__global__ void __launch_bounds__(kThreads, min_blocks(kKeys))
    gated_delta_net_prefill_kernel(const __grid_constant__ GatedDeltaNet args, std::int64_t tiles) {
  __shared__ Stage<kKeys> stage;
  const Work work = work_of_block(args, tiles);
  if (work.slot < 0) {
    zero_outputs(args, work);
    return;
  }
  if (work.length == 0) {
    return;
  }
  const Head head = head_of(args, work);
  StateTile<kKeys> state;
  if (args.table[work.slot].kv_len == 0) {
    state.clear();
  } else {
    state.load(head.state, work, args);
  }
  for (std::int64_t done = 0; done < work.length; done += kSteps) {
    const int count = steps_left(work.length, done);
    stage_tokens(args, work, done, count, stage);
    __syncthreads();
    state.run(stage, count);
    __syncthreads();
    store_outputs(args, work, done, count, stage);
  }
  state.store(head.state, work, args);
}

// One CTA per row, value head and tile of value dims. The ring rows read, the live records, are
// disjoint from those that the CTAs of the slot write behind them.
template <int kKeys>
__global__ void __launch_bounds__(kThreads, min_blocks(kKeys))
    gated_delta_net_verify_kernel(const __grid_constant__ GatedDeltaNet args, std::int64_t tiles) {
  __shared__ Stage<kKeys> stage;
  const Work work = work_of_block(args, tiles);
  if (work.slot < 0) {
    zero_outputs(args, work);
    return;
  }
  if (work.length == 0) {
    return;
  }
  const Head head = head_of(args, work);
  const SlotState& cursors = args.table[work.slot];
  const std::int64_t base = cursors.ring_base;
  const std::int64_t history = cursors.ring_history;
  StateTile<kKeys> state;
  if (cursors.kv_len == 0) {
    // The slot's old state stays unread; the commit makes kv_len positive, so it must not stay.
    state.clear();
    state.store(head.state, work, args);
  } else {
    state.load(head.state, work, args);
    for (std::int64_t done = 0; done < history; done += kSteps) {
      const int count = steps_left(history, done);
      stage_records(args, work, head, base + done, count, stage);
      __syncthreads();
      state.replay(stage, count);
      __syncthreads();
    }
    if (history > 0 && flushes(history, work.length, args.history_limit)) {
      state.store(head.state, work, args);
    }
  }
  for (std::int64_t done = 0; done < work.length; done += kSteps) {
    const int count = steps_left(work.length, done);
    stage_tokens(args, work, done, count, stage);
    __syncthreads();
    state.run(stage, count);
    __syncthreads();
    store_outputs(args, work, done, count, stage);
    // The same row with and without a flush: a flush moves the base behind the history.
    append_records(args, work, head, base + history + done, count, stage);
    __syncthreads();
  }
}

[[noreturn]] void refuse(const char* op, const std::string& expected, const std::string& found) {
  throw std::invalid_argument(std::string(op) + ": expected " + expected + ", got " + found);
}

void check(const GatedDeltaNet& args, const char* op) {
  require_float32(args.dtype, op);
  if (args.num_key_heads <= 0 || args.num_value_heads <= 0 ||
      args.num_value_heads % args.num_key_heads != 0) {
    refuse(op, "num_value_heads to be a positive multiple of num_key_heads",
           std::to_string(args.num_value_heads) + " and " + std::to_string(args.num_key_heads));
  }
  if (args.key_dim <= 0 || args.key_dim > 256 || args.value_dim <= 0) {
    refuse(op, "key_dim in [1, 256] and value_dim > 0",
           std::to_string(args.key_dim) + " and " + std::to_string(args.value_dim));
  }
  const std::int64_t width =
      2 * args.num_key_heads * args.key_dim + args.num_value_heads * args.value_dim;
  if (args.qkv_stride < width) {
    refuse(op, "qkv_stride >= " + std::to_string(width), std::to_string(args.qkv_stride));
  }
  if (args.ba_stride < 2 * args.num_value_heads) {
    refuse(op, "ba_stride >= " + std::to_string(2 * args.num_value_heads),
           std::to_string(args.ba_stride));
  }
}

void check_ring(const GatedDeltaNet& args, const char* op) {
  if (args.ring_dtype != DType::kFloat32) {
    refuse(op, "ring_dtype float32", std::string(name_of(args.ring_dtype)));
  }
  if (args.ring_rows <= 0 || !std::has_single_bit(static_cast<std::uint64_t>(args.ring_rows))) {
    refuse(op, "ring_rows to be a power of two", std::to_string(args.ring_rows));
  }
  if (args.history_limit < 0) {
    refuse(op, "history_limit >= 0", std::to_string(args.history_limit));
  }
}

}  // namespace

void gated_delta_net_prefill(const GatedDeltaNet& args, Stream stream) {
  constexpr const char* kOp = "gated_delta_net_prefill";
  check(args, kOp);
  if (args.rows.num_rows == 0) {
    return;
  }
  const std::int64_t tiles = ceil_div(args.value_dim, kTileRows);
  const unsigned grid = grid_x(args.rows.num_rows * args.num_value_heads * tiles, kOp);
  dispatch_at_least<32, 64, 128, 256>(args.key_dim, [&](auto keys) {
    gated_delta_net_prefill_kernel<keys.value>
        <<<grid, kThreads, 0, cuda_stream(stream)>>>(args, tiles);
  });
  check_cuda(cudaGetLastError(), kOp);
}

void gated_delta_net_verify(const GatedDeltaNet& args, Stream stream) {
  constexpr const char* kOp = "gated_delta_net_verify";
  check(args, kOp);
  check_ring(args, kOp);
  if (args.rows.num_rows == 0) {
    return;
  }
  const std::int64_t tiles = ceil_div(args.value_dim, kTileRows);
  const unsigned grid = grid_x(args.rows.num_rows * args.num_value_heads * tiles, kOp);
  dispatch_at_least<32, 64, 128, 256>(args.key_dim, [&](auto keys) {
    gated_delta_net_verify_kernel<keys.value>
        <<<grid, kThreads, 0, cuda_stream(stream)>>>(args, tiles);
  });
  check_cuda(cudaGetLastError(), kOp);
}

}  // namespace deltaflash::cuda
