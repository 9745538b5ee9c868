#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "plugins/causal_conv/causal_conv.h"
#include "plugins/common/simd.h"
#include "plugins/common/thread_pool.h"

namespace deltaflash::cpu {
namespace {

using simd::kLanes;
using simd::Lanes;

// Channels that one task convolves over all tokens of a row.
constexpr std::int64_t kBlock = 256;
constexpr std::int64_t kGrain = 2048;  // outputs below which a further thread does not pay
constexpr std::int64_t kMaxKernel = 16;

struct Row {
  std::int64_t slot;
  std::int64_t begin;  // its first token in the packed buffers
  std::int64_t length;
  std::int64_t kv_len;  // the position of its first token in the sequence
};

Row row_at(const CausalConv& args, std::int64_t index) {
  const std::int64_t slot = args.rows.slots[index];
  const std::int64_t begin = args.rows.row_start[index];
  return {slot, begin, args.rows.row_start[index + 1] - begin,
          slot < 0 ? 0 : args.table[slot].kv_len};
}

/// Convolves channels [first, first + num_channels) of a row and writes its newest inputs back.
DELTAFLASH_SIMD
void convolve(const CausalConv& args, const Row& row, std::int64_t first,
              std::int64_t num_channels) {
  const std::int64_t channels = args.channels;
  const std::int64_t history = args.kernel - 1;
  const float* x = static_cast<const float*>(args.x) + row.begin * args.x_stride + first;
  float* out = static_cast<float*>(args.out) + row.begin * channels + first;
  float* ring = static_cast<float*>(args.ring) + row.slot * args.ring_cols * channels + first;

  alignas(64) float taps[kMaxKernel][kBlock] = {};  // the weights, channels innermost
  for (std::int64_t c = 0; c < num_channels; ++c) {
    for (std::int64_t j = 0; j < args.kernel; ++j) {
      taps[j][c] = args.weight[(first + c) * args.kernel + j];
    }
  }
  for (std::int64_t t = 0; t < row.length; ++t) {
    // The first tap that lies within the sequence; what an older one points at is not read.
    const std::int64_t oldest = std::max<std::int64_t>(0, history - (row.kv_len + t));
    const float* inputs[kMaxKernel];
    for (std::int64_t j = 0; j < args.kernel; ++j) {
      const std::int64_t token = t - (history - j);
      inputs[j] = token >= 0 ? x + token * args.x_stride
                             : ring + ((row.kv_len + token) & (args.ring_cols - 1)) * channels;
    }
    for (std::int64_t c = 0; c < num_channels; c += kLanes) {
      const std::int64_t left = num_channels - c;
      Lanes y = {};
      if (left >= kLanes) {
        for (std::int64_t j = oldest; j < args.kernel; ++j) {
          y += simd::load(taps[j] + c) * simd::load(inputs[j] + c);
        }
        simd::store(out + t * channels + c, simd::silu(y));
      } else {
        for (std::int64_t j = oldest; j < args.kernel; ++j) {
          y += simd::load(taps[j] + c) * simd::load(inputs[j] + c, left);
        }
        simd::store(out + t * channels + c, simd::silu(y), left);
      }
    }
  }
  for (std::int64_t t = std::max<std::int64_t>(0, row.length - args.ring_cols); t < row.length;
       ++t) {
    std::memcpy(ring + ((row.kv_len + t) & (args.ring_cols - 1)) * channels, x + t * args.x_stride,
                static_cast<std::size_t>(num_channels) * sizeof(float));
  }
}

void check(const CausalConv& args) {
  if (args.dtype != DType::kFloat32) {
    throw std::invalid_argument("causal_conv: expected dtype float32, got " +
                                std::string(name_of(args.dtype)));
  }
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
  const std::int64_t blocks = (args.channels + kBlock - 1) / kBlock;
  const std::int64_t tokens_per_row = std::max<std::int64_t>(
      1, args.rows.num_tokens / std::max<std::int64_t>(1, args.rows.num_rows));
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / (kBlock * tokens_per_row));
  parallel_for(stream, args.rows.num_rows * blocks, grain,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t task = begin; task < end; ++task) {
                   const Row row = row_at(args, task / blocks);
                   const std::int64_t first = task % blocks * kBlock;
                   const std::int64_t count = std::min(kBlock, args.channels - first);
                   if (row.slot >= 0) {
                     convolve(args, row, first, count);
                     continue;
                   }
                   float* out = static_cast<float*>(args.out) + first;
                   for (std::int64_t t = row.begin; t < row.begin + row.length; ++t) {
                     std::fill_n(out + t * args.channels, count, 0.0f);
                   }
                 }
               });
}

}  // namespace deltaflash::cpu
