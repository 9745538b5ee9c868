#include <bit>

#include "plugins/causal_conv/causal_conv.h"
#include "plugins/common/cuda_error.h"
#include "plugins/common/cuda_launch.h"

namespace deltaflash::cuda {
namespace {

constexpr int kThreads = 128;    // channels of a CTA
constexpr int kTileTokens = 16;  // tokens of a CTA, one after the other in each thread
constexpr int kMaxKernel = 16;

struct Row {
  std::int64_t slot;
  std::int64_t begin;   // its first token in the packed buffers
  std::int64_t length;  // tokens
};

__device__ __forceinline__ Row row_at(const RowBatch& rows, std::int64_t index) {
  const std::int64_t begin = rows.row_start[index];
  return {rows.slots[index], begin, rows.row_start[index + 1] - begin};
}

// Whether a row's inputs and the older ones it reads fit the ring at once. If so, whoever computes
// a token may store it; if not, storing must wait until every old input has been read.
__device__ __forceinline__ bool fits_ring(const CausalConv& args, std::int64_t length) {
  return length + args.kernel - 1 <= args.ring_cols;
}

// One CTA per row, tile of tokens and stretch of channels. kTaps >= kernel; the older taps are
// zero.
template <int kTaps>
__global__ void __launch_bounds__(kThreads)
    causal_conv_kernel(const __grid_constant__ CausalConv args, std::int64_t tiles,
                       std::int64_t stretches) {
  const std::int64_t stretch = blockIdx.x % stretches;
  const std::int64_t tile = blockIdx.x / stretches % tiles;
  const Row row = row_at(args.rows, blockIdx.x / stretches / tiles);
  const std::int64_t first = tile * kTileTokens;
  const std::int64_t channel = stretch * kThreads + threadIdx.x;
  if (first >= row.length || channel >= args.channels) {
    return;
  }
  const std::int64_t last = first + kTileTokens < row.length ? first + kTileTokens : row.length;
  float* out = static_cast<float*>(args.out) + row.begin * args.channels + channel;
  if (row.slot < 0) {
    for (std::int64_t t = first; t < last; ++t) {
      out[t * args.channels] = 0.0f;
    }
    return;
  }
  const std::int64_t kv_len = args.table[row.slot].kv_len;
  const float* x = static_cast<const float*>(args.x) + row.begin * args.x_stride + channel;
  float* ring =
      static_cast<float*>(args.ring) + row.slot * args.ring_cols * args.channels + channel;
  const std::int64_t mask = args.ring_cols - 1;
  const int unused = kTaps - static_cast<int>(args.kernel);
  const bool stores = fits_ring(args, row.length);

  float taps[kTaps];
  float window[kTaps] = {};  // window[j] meets taps[j]
#pragma unroll
  for (int j = 0; j < kTaps; ++j) {
    taps[j] = j < unused ? 0.0f : args.weight[channel * args.kernel + (j - unused)];
  }
#pragma unroll
  for (int j = 0; j < kTaps - 1; ++j) {
    // Each token shifts the window by one, the first one too.
    const std::int64_t token = first - (kTaps - 1 - j);
    float value = 0.0f;
    if (j >= unused && kv_len + token >= 0) {
      value =
          token >= 0 ? x[token * args.x_stride] : ring[((kv_len + token) & mask) * args.channels];
    }
    window[j + 1] = value;
  }
  for (std::int64_t t = first; t < last; ++t) {
    const float current = x[t * args.x_stride];
#pragma unroll
    for (int j = 0; j < kTaps - 1; ++j) {
      window[j] = window[j + 1];
    }
    window[kTaps - 1] = current;
    float y = 0.0f;
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      y = fmaf(taps[j], window[j], y);
    }
    out[t * args.channels] = y / (1.0f + expf(-y));
    if (stores) {
      ring[((kv_len + t) & mask) * args.channels] = current;
    }
  }
}

// The newest inputs of rows that do not fit the ring. One CTA per row, ring column and stretch.
__global__ void __launch_bounds__(kThreads)
    store_newest_kernel(const __grid_constant__ CausalConv args, std::int64_t stretches) {
  const std::int64_t stretch = blockIdx.x % stretches;
  const std::int64_t column = blockIdx.x / stretches % args.ring_cols;
  const Row row = row_at(args.rows, blockIdx.x / stretches / args.ring_cols);
  const std::int64_t channel = stretch * kThreads + threadIdx.x;
  if (row.slot < 0 || fits_ring(args, row.length) || channel >= args.channels) {
    return;
  }
  const std::int64_t t = row.length - args.ring_cols + column;
  if (t < 0) {
    return;
  }
  const std::int64_t to = (args.table[row.slot].kv_len + t) & (args.ring_cols - 1);
  const float* x = static_cast<const float*>(args.x) + (row.begin + t) * args.x_stride;
  static_cast<float*>(args.ring)[(row.slot * args.ring_cols + to) * args.channels + channel] =
      x[channel];
}

void check(const CausalConv& args) {
  require_float32(args.dtype, "causal_conv");
  if (args.channels <= 0 || args.x_stride < args.channels) {
    throw std::invalid_argument("causal_conv: expected 0 < channels <= x_stride, got " +
                                std::to_string(args.channels) + " and " +
                                std::to_string(args.x_stride));
  }
  if (args.kernel < 1 || args.kernel > kMaxKernel) {
    throw std::invalid_argument("causal_conv: expected a kernel of 1 to " +
                                std::to_string(kMaxKernel) + " taps, got " +
                                std::to_string(args.kernel));
  }
  if (args.ring_cols < args.kernel ||
      !std::has_single_bit(static_cast<std::uint64_t>(args.ring_cols))) {
    throw std::invalid_argument(
        "causal_conv: expected ring_cols to be a power of two >= the kernel, got " +
        std::to_string(args.ring_cols));
  }
}

}  // namespace

void causal_conv(const CausalConv& args, Stream stream) {
  check(args);
  const std::int64_t tiles = ceil_div(args.rows.max_row_tokens, kTileTokens);
  const std::int64_t stretches = ceil_div(args.channels, kThreads);
  if (args.rows.num_rows == 0 || tiles == 0) {
    return;
  }
  const unsigned grid = grid_x(args.rows.num_rows * tiles * stretches, "causal_conv");
  if (args.kernel <= 4) {
    causal_conv_kernel<4><<<grid, kThreads, 0, cuda_stream(stream)>>>(args, tiles, stretches);
  } else {
    causal_conv_kernel<kMaxKernel>
        <<<grid, kThreads, 0, cuda_stream(stream)>>>(args, tiles, stretches);
  }
  check_cuda(cudaGetLastError(), "causal_conv");
  if (args.rows.max_row_tokens + args.kernel - 1 > args.ring_cols) {
    const unsigned columns = grid_x(args.rows.num_rows * args.ring_cols * stretches, "causal_conv");
    store_newest_kernel<<<columns, kThreads, 0, cuda_stream(stream)>>>(args, stretches);
    check_cuda(cudaGetLastError(), "causal_conv");
  }
}

}  // namespace deltaflash::cuda
