#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "plugins/common/simd.h"
#include "plugins/common/thread_pool.h"
#include "plugins/vision_attention/vision_attention.h"

namespace deltaflash::cpu {
namespace {

using simd::kLanesOf;
using simd::Words;

constexpr std::int64_t kQueries = VisionAttention::kQueryTile;
constexpr std::int64_t kKeys = 128;        // a block: the scores of a query tile fit a core's cache
constexpr std::int64_t kMaxHeadDim = 128;  // also the stride of a tile's queries and sums
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kMasked = -std::numeric_limits<float>::infinity();
static_assert(kKeys % VisionKv::kTile == 0);

// 2^x within 1 ulp for x <= 1, with x below -125 as -125: a minimax polynomial on [-1/2, 1/2],
// exact at 0, then the integer part added to the exponent. NaN stays NaN.
template <typename L>
DELTAFLASH_INLINE L exp2(L x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits
  const L low = simd::broadcast<L>(-125.0f);
  x = low > x ? low : x;  // keeps a NaN
  const L shifted = x + kRound;
  const L f = x - (shifted - kRound);
  L p = f * 1.53533605e-4f + 1.33988750e-3f;
  p = p * f + 9.61843692e-3f;
  p = p * f + 5.55033237e-2f;
  p = p * f + 2.40226477e-1f;
  p = p * f + 6.93147182e-1f;
  p = p * f + 1.0f;
  return std::bit_cast<L>(std::bit_cast<Words<L>>(p) + (std::bit_cast<Words<L>>(shifted) << 23));
}

template <typename L>
DELTAFLASH_INLINE float highest_lane(L lanes) {
  float at[kLanesOf<L>];
  simd::store(at, lanes);
  auto top = simd::load<simd::Lanes4>(at);
  for (std::int64_t i = 4; i < kLanesOf<L>; i += 4) {
    const auto other = simd::load<simd::Lanes4>(at + i);
    top = other > top ? other : top;
  }
  const float low = top[0] > top[1] ? top[0] : top[1];
  const float high = top[2] > top[3] ? top[2] : top[3];
  return low > high ? low : high;
}

// One thread's work space for a query tile.
struct Tile {
  std::int64_t rows;    // queries in use; the others are zero
  std::int64_t stride;  // of a value row
  float* q;             // [kQueries, kMaxHeadDim], times scale * log2(e): scores are powers of two
  float* scores;        // [kQueries, kKeys]
  float* acc;           // [kQueries, kMaxHeadDim]: sum of 2^(score - max) * value
  float* sum;           // [kQueries, 16]: sum of 2^(score - max), lane by lane
  float* max;           // [kQueries]

  static constexpr std::int64_t kCount = kQueries * (2 * kMaxHeadDim + kKeys + simd::kLanes + 1);
};

// out[r, :] = (kAdd ? out[r, :] : 0) + sum_k a[r, k] * b[k, :], k after k, for kRows rows and
// kVectors vectors. Rows of a and out are 128 floats apart.
template <typename L, int kRows, int kVectors, bool kAdd>
DELTAFLASH_INLINE void multiply_block(const float* a, const float* b, std::int64_t b_stride,
                                      std::int64_t count, float* out) {
  static_assert(kMaxHeadDim == kKeys);
  L sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = kAdd ? simd::load<L>(out + r * kKeys + v * kLanesOf<L>) : L{};
    }
  }
  for (std::int64_t k = 0; k < count; ++k, b += b_stride) {
    L row[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      row[v] = simd::load<L>(b + v * kLanesOf<L>);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const float x = a[r * kKeys + k];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] += x * row[v];
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      simd::store(out + r * kKeys + v * kLanesOf<L>, sums[r][v]);
    }
  }
}

template <typename L, int kRows, int kVectors, bool kAdd>
DELTAFLASH_INLINE void multiply_columns(std::int64_t rows, const float* a, const float* b,
                                        std::int64_t b_stride, std::int64_t count, float* out) {
  static_assert(kQueries % kRows == 0);
  for (std::int64_t r = 0; r < rows; r += kRows) {
    multiply_block<L, kRows, kVectors, kAdd>(a + r * kKeys, b, b_stride, count, out + r * kKeys);
  }
}

// As multiply_block, for any number of rows and `width` columns, a multiple of 16.
template <typename L, bool kAdd>
DELTAFLASH_INLINE void multiply(std::int64_t rows, const float* a, const float* b,
                                std::int64_t b_stride, std::int64_t count, float* out,
                                std::int64_t width) {
  if constexpr (sizeof(L) < 64) {  // 16 registers
    constexpr std::int64_t kStep = 2 * kLanesOf<L>;
    for (std::int64_t i = 0; i < width; i += kStep) {
      multiply_columns<L, 6, 2, kAdd>(rows, a, b + i, b_stride, count, out + i);
    }
  } else {  // 32 registers; 5 vectors are 3 and 2, since one alone is bound by its loads
    std::int64_t vectors = width / 16;
    for (; vectors == 4 || vectors > 5; vectors -= 4, b += 64, out += 64) {
      multiply_columns<L, 6, 4, kAdd>(rows, a, b, b_stride, count, out);
    }
    if (vectors == 3 || vectors == 5) {
      multiply_columns<L, 8, 3, kAdd>(rows, a, b, b_stride, count, out);
      vectors -= 3;
      b += 48;
      out += 48;
    }
    if (vectors == 2) {
      multiply_columns<L, 12, 2, kAdd>(rows, a, b, b_stride, count, out);
    } else if (vectors == 1) {
      multiply_columns<L, 12, 1, kAdd>(rows, a, b, b_stride, count, out);
    }
  }
}

// Turns a row of scores into weights 2^(score - max); a new maximum scales the sums so far.
template <typename L>
DELTAFLASH_INLINE void softmax_row(const Tile& tile, std::int64_t row, std::int64_t count) {
  float* scores = tile.scores + row * kKeys;
  float* sum = tile.sum + row * simd::kLanes;
  L top = simd::load<L>(scores);
  for (std::int64_t i = kLanesOf<L>; i < count; i += kLanesOf<L>) {
    const L other = simd::load<L>(scores + i);
    top = other > top ? other : top;
  }
  const float top_lane = highest_lane(top);
  const float highest = top_lane > tile.max[row] ? top_lane : tile.max[row];
  L total = simd::load<L>(sum);
  if (highest > tile.max[row]) {
    const L factor = exp2(simd::broadcast<L>(tile.max[row] - highest));
    float* acc = tile.acc + row * kMaxHeadDim;
    for (std::int64_t d = 0; d < tile.stride; d += kLanesOf<L>) {
      simd::store(acc + d, simd::load<L>(acc + d) * factor);
    }
    total *= factor;
    tile.max[row] = highest;
  }
  for (std::int64_t i = 0; i < count; i += kLanesOf<L>) {
    const L weight = exp2<L>(simd::load<L>(scores + i) - highest);
    simd::store(scores + i, weight);
    total += weight;
  }
  simd::store(sum, total);
}

// All keys of one head for one query tile.
template <typename L>
DELTAFLASH_INLINE void attend(const Tile& tile, const VisionKv& kv, const float* keys,
                              const float* values) {
  for (std::int64_t first = 0; first < kv.num_patches; first += kKeys) {
    const std::int64_t present = std::min(kKeys, kv.num_patches - first);
    const std::int64_t count = (present + VisionKv::kTile - 1) / VisionKv::kTile * VisionKv::kTile;
    for (std::int64_t i = 0; i < count; i += VisionKv::kTile) {
      multiply<L, false>(tile.rows, tile.q, keys + (first + i) * kv.head_dim, VisionKv::kTile,
                         kv.head_dim, tile.scores + i, VisionKv::kTile);
    }
    for (std::int64_t row = 0; row < tile.rows; ++row) {
      std::fill(tile.scores + row * kKeys + present, tile.scores + row * kKeys + count, kMasked);
      softmax_row<L>(tile, row, count);
    }
    multiply<L, true>(tile.rows, tile.scores, values + first * tile.stride, tile.stride, present,
                      tile.acc, tile.stride);
  }
}

void run_tile(const VisionAttention& args, std::int64_t head, std::int64_t first, float* next) {
  const VisionKv& kv = args.kv;
  const auto take = [&next](std::int64_t count) {
    float* taken = next;
    next += count;
    return taken;
  };
  Tile tile{};
  tile.rows = std::min(kQueries, args.num_rows - first);
  tile.stride = kv.value_stride();
  tile.q = take(kQueries * kMaxHeadDim);
  tile.scores = take(kQueries * kKeys);
  tile.acc = take(kQueries * kMaxHeadDim);
  tile.sum = take(kQueries * simd::kLanes);
  tile.max = take(kQueries);
  std::fill_n(tile.q, kQueries * kMaxHeadDim, 0.0f);
  std::fill_n(tile.acc, kQueries * kMaxHeadDim, 0.0f);
  std::fill_n(tile.sum, kQueries * simd::kLanes, 0.0f);
  std::fill_n(tile.max, kQueries, kMasked);

  const std::int64_t row_stride = kv.num_heads * kv.head_dim;
  const std::int64_t offset = first * row_stride + head * kv.head_dim;
  const float factor = args.scale * kLog2E;
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    const float* q = args.q + offset + row * row_stride;
    for (std::int64_t d = 0; d < kv.head_dim; ++d) {
      tile.q[row * kMaxHeadDim + d] = q[d] * factor;
    }
  }
  const std::int64_t padded = kv.num_tiles() * VisionKv::kTile;
  simd::for_machine([&](auto lanes) DELTAFLASH_INLINE_LAMBDA {
    attend<typename decltype(lanes)::type>(tile, kv, kv.keys + head * padded * kv.head_dim,
                                           kv.values + head * padded * tile.stride);
  });
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    const float inv_sum = 1.0f / simd::sum(simd::load(tile.sum + row * simd::kLanes));
    float* out = args.out + offset + row * row_stride;
    for (std::int64_t d = 0; d < kv.head_dim; ++d) {
      out[d] = tile.acc[row * kMaxHeadDim + d] * inv_sum;
    }
  }
}

void check(const VisionAttention& args) {
  const VisionKv& kv = args.kv;
  if (kv.head_dim < 16 || kv.head_dim > kMaxHeadDim || kv.head_dim % 4 != 0) {
    throw std::invalid_argument(
        "vision_attention: expected a head_dim in 16 .. 128 that is a multiple of 4, got " +
        std::to_string(kv.head_dim));
  }
  if (kv.num_heads <= 0 || kv.num_patches <= 0 || args.num_rows < 0) {
    throw std::invalid_argument(
        "vision_attention: expected num_heads > 0, num_patches > 0 and num_rows >= 0, got " +
        std::to_string(kv.num_heads) + ", " + std::to_string(kv.num_patches) + " and " +
        std::to_string(args.num_rows));
  }
}

}  // namespace

void vision_attention(const VisionAttention& args, Stream stream) {
  check(args);
  const std::int64_t tiles = (args.num_rows + kQueries - 1) / kQueries;
  parallel_for(stream, tiles * args.kv.num_heads, 1, [&](std::int64_t begin, std::int64_t end) {
    simd::Scratch scratch(Tile::kCount);
    float* work = scratch.take(Tile::kCount);
    for (std::int64_t item = begin; item < end; ++item) {
      run_tile(args, item / tiles, item % tiles * kQueries, work);
    }
  });
}

}  // namespace deltaflash::cpu
