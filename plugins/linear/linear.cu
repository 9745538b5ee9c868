#include <stdexcept>
#include <string>

#include "plugins/common/cuda_error.h"
#include "plugins/common/cuda_launch.h"
#include "plugins/linear/linear.h"

namespace deltaflash::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSide = 16;  // threads along the rows and along the columns of an output tile

// One CTA per kTileM x kTileN outputs, walking over k in steps of kTileK through shared memory;
// the next step's operands are on their way in registers meanwhile. Every output is one fp32 sum in
// order of k in one thread, so the tile sizes do not touch its bits.
template <int kTileM, int kTileN, int kTileK>
__global__ void __launch_bounds__(kThreads)
    linear_kernel(const float* __restrict__ x, const std::uint16_t* __restrict__ weight,
                  float* __restrict__ out, std::int64_t num_tokens, std::int64_t in_dim,
                  std::int64_t out_dim, std::int64_t column_tiles) {
  constexpr int kThreadM = kTileM / kSide;
  constexpr int kThreadN = kTileN / kSide;
  constexpr int kLoadX = kTileM * kTileK / kThreads;  // elements a thread brings in per step
  constexpr int kLoadW = kTileN * kTileK / kThreads;
  constexpr int kXPerRow = kTileK / kLoadX;  // threads that share a row
  constexpr int kWPerRow = kTileK / kLoadW;
  static_assert(kTileK % kLoadX == 0 && kTileK % kLoadW == 0);
  static_assert(kLoadX % 4 == 0 && kLoadW % 8 == 0);
  __shared__ float x_tile[kTileK][kTileM + 1];  // k first: a thread reads its rows of one k
  __shared__ float w_tile[kTileK][kTileN + 1];

  const int tid = static_cast<int>(threadIdx.x);
  const std::int64_t first_n = blockIdx.x % column_tiles * kTileN;
  const std::int64_t first_m = blockIdx.x / column_tiles * kTileM;
  const int x_row = tid / kXPerRow;
  const int x_k = tid % kXPerRow * kLoadX;
  const int w_row = tid / kWPerRow;
  const int w_k = tid % kWPerRow * kLoadW;
  const bool x_in_use = first_m + x_row < num_tokens;
  const bool w_in_use = first_n + w_row < out_dim;
  const float* x_from = x + (first_m + (x_in_use ? x_row : 0)) * in_dim;
  const std::uint16_t* w_from = weight + (first_n + (w_in_use ? w_row : 0)) * in_dim;
  const bool whole_vectors = in_dim % 8 == 0;

  float x_next[kLoadX];
  std::uint16_t w_next[kLoadW];
  const auto load = [&](std::int64_t k) {
    if (whole_vectors) {
#pragma unroll
      for (int i = 0; i < kLoadX; i += 4) {
        const bool in_use = x_in_use && k + x_k + i < in_dim;
        const float4 four = in_use ? *reinterpret_cast<const float4*>(x_from + k + x_k + i)
                                   : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        x_next[i] = four.x;
        x_next[i + 1] = four.y;
        x_next[i + 2] = four.z;
        x_next[i + 3] = four.w;
      }
#pragma unroll
      for (int i = 0; i < kLoadW; i += 8) {
        const bool in_use = w_in_use && k + w_k + i < in_dim;
        const uint4 eight =
            in_use ? *reinterpret_cast<const uint4*>(w_from + k + w_k + i) : make_uint4(0, 0, 0, 0);
        const std::uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          w_next[i + 2 * j] = static_cast<std::uint16_t>(words[j]);
          w_next[i + 2 * j + 1] = static_cast<std::uint16_t>(words[j] >> 16);
        }
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kLoadX; ++i) {
      x_next[i] = x_in_use && k + x_k + i < in_dim ? x_from[k + x_k + i] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kLoadW; ++i) {
      w_next[i] = w_in_use && k + w_k + i < in_dim ? w_from[k + w_k + i] : std::uint16_t{0};
    }
  };

  const int thread_m = tid / kSide;  // rows thread_m + i * kSide, columns thread_n + j * kSide
  const int thread_n = tid % kSide;
  float sums[kThreadM][kThreadN] = {};
  load(0);
  for (std::int64_t k = 0; k < in_dim; k += kTileK) {
#pragma unroll
    for (int i = 0; i < kLoadX; ++i) {
      x_tile[x_k + i][x_row] = x_next[i];
    }
#pragma unroll
    for (int i = 0; i < kLoadW; ++i) {
      w_tile[w_k + i][w_row] = __uint_as_float(std::uint32_t{w_next[i]} << 16);
    }
    __syncthreads();
    if (k + kTileK < in_dim) {
      load(k + kTileK);
    }
#pragma unroll 8
    for (int kk = 0; kk < kTileK; ++kk) {
      float x_at[kThreadM];
      float w_at[kThreadN];
#pragma unroll
      for (int i = 0; i < kThreadM; ++i) {
        x_at[i] = x_tile[kk][thread_m + i * kSide];
      }
#pragma unroll
      for (int j = 0; j < kThreadN; ++j) {
        w_at[j] = w_tile[kk][thread_n + j * kSide];
      }
#pragma unroll
      for (int i = 0; i < kThreadM; ++i) {
#pragma unroll
        for (int j = 0; j < kThreadN; ++j) {
          sums[i][j] = __fmaf_rn(x_at[i], w_at[j], sums[i][j]);
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kThreadM; ++i) {
    const std::int64_t m = first_m + thread_m + i * kSide;
#pragma unroll
    for (int j = 0; j < kThreadN; ++j) {
      const std::int64_t n = first_n + thread_n + j * kSide;
      if (m < num_tokens && n < out_dim) {
        out[m * out_dim + n] = sums[i][j];
      }
    }
  }
}

template <int kTileM, int kTileN, int kTileK>
void launch(const Linear& args, Stream stream) {
  const std::int64_t column_tiles = ceil_div(args.out_dim, kTileN);
  const unsigned grid = grid_x(ceil_div(args.num_tokens, kTileM) * column_tiles, "linear");
  linear_kernel<kTileM, kTileN, kTileK><<<grid, kThreads, 0, cuda_stream(stream)>>>(
      args.x, static_cast<const std::uint16_t*>(args.weight), args.out, args.num_tokens,
      args.in_dim, args.out_dim, column_tiles);
  check_cuda(cudaGetLastError(), "linear");
}

}  // namespace

void linear(const Linear& args, Stream stream) {
  require_positive(args.in_dim, "linear", "in_dim");
  require_positive(args.out_dim, "linear", "out_dim");
  if (args.weight_dtype != DType::kBFloat16) {
    throw std::invalid_argument("linear: expected weight_dtype bfloat16, got " +
                                std::string(name_of(args.weight_dtype)));
  }
  if (args.num_tokens == 0) {
    return;
  }
  if (args.num_tokens <= 16) {
    launch<16, 32, 128>(args, stream);
  } else {
    launch<64, 64, 32>(args, stream);
  }
}

}  // namespace deltaflash::cuda
