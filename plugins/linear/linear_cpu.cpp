#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "plugins/common/dispatch.h"
#include "plugins/common/simd.h"
#include "plugins/common/thread_pool.h"
#include "plugins/linear/linear.h"

// Lanes hold outputs that stand side by side, each with its own sum over k, so that one weight row
// alone decides a lane. Weight rows are turned into columns on the way in: for a few tokens in
// registers, for many into panels that lie in the cache and meet a tile of tokens each.

namespace deltaflash::cpu {
namespace {

using simd::kLanesOf;
using simd::Words;

constexpr std::int64_t kSum = 32;        // products that are added up before they meet the rest
constexpr std::int64_t kDepth = 256;     // k of a panel, a multiple of kSum
constexpr std::int64_t kStep = 16;       // k are walked in steps, with zeros behind the last
constexpr std::int64_t kBlockRows = 32;  // weight rows that no part may split
constexpr std::int64_t kPartRows = 128;  // weight rows whose panels meet a tile of tokens in turn
constexpr std::int64_t kMaxTileRows = 12;
constexpr std::int64_t kFewTokens = 8;    // no more than this many take the way without panels
constexpr std::int64_t kGrain = 1 << 17;  // multiply-adds below which a further thread costs more
constexpr std::int64_t kMinPartTokens = 128;  // tokens for which turning the weights pays anew

constexpr std::int64_t share(std::int64_t count, std::int64_t parts) {
  return (count + parts - 1) / parts;
}

/// The weight rows of a panel.
template <typename L>
constexpr std::int64_t kWidth = 2 * kLanesOf<L>;

/// Tokens of a tile: with both vectors of a panel they fill the registers.
template <typename L>
constexpr std::int64_t kTileRows = sizeof(L) == 64   ? 12
                                   : sizeof(L) == 32 ? 6
                                                     : 4;

template <typename T>
struct Matrix {
  const T* weight;  // [num_rows, depth]
  std::int64_t num_rows;
  std::int64_t depth;
};

/// kLanesOf<L> rows of weights, of which kStep numbers are read.
template <typename T>
struct Block {
  const T* rows;
  std::int64_t stride;
};

/// Rows [row, row + kLanesOf<L>) from k on, copied to `copy` with zeros behind the matrix's end.
template <typename L, typename T>
Block<T> copy_block(const Matrix<T>& matrix, std::int64_t row, std::int64_t k, T* copy) {
  std::memset(copy, 0, kLanesOf<L> * kStep * sizeof(T));
  const std::int64_t num_rows = std::min(kLanesOf<L>, matrix.num_rows - row);
  const std::int64_t count = std::min(kStep, matrix.depth - k);
  for (std::int64_t r = 0; r < num_rows; ++r) {
    std::memcpy(copy + r * kStep, matrix.weight + (row + r) * matrix.depth + k,
                static_cast<std::size_t>(count) * sizeof(T));
  }
  return {copy, kStep};
}

/// Calls use(k, blocks) for the steps in [begin, end); block v has the rows from
/// row + v * kLanesOf<L> on.
template <typename L, int kVectors, typename T, typename Use>
DELTAFLASH_INLINE void for_each_step(const Matrix<T>& matrix, std::int64_t row, std::int64_t begin,
                                     std::int64_t end, const Use& use) {
  Block<T> blocks[kVectors];
  std::int64_t k = begin;
  if (row + kVectors * kLanesOf<L> <= matrix.num_rows) {
    for (; k + kStep <= end; k += kStep) {
#pragma GCC unroll 2
      for (std::int64_t v = 0; v < kVectors; ++v) {
        blocks[v] = {matrix.weight + (row + v * kLanesOf<L>)*matrix.depth + k, matrix.depth};
      }
      use(k, blocks);
    }
  }
  for (; k < end; k += kStep) {
    alignas(64) T copies[kVectors][kLanesOf<L> * kStep];
    for (std::int64_t v = 0; v < kVectors; ++v) {
      blocks[v] =
          copy_block<L>(matrix, std::min(row + v * kLanesOf<L>, matrix.num_rows), k, copies[v]);
    }
    use(k, blocks);
  }
}

/// Lanes 4 j to 4 j + 3 are the 16 bytes at from[j] + offset.
template <typename L, typename T>
DELTAFLASH_INLINE L load_quads(const T* const (&from)[kLanesOf<L> / 4], std::int64_t offset) {
  const auto quad = [&](int j) DELTAFLASH_INLINE_LAMBDA {
    return simd::load<simd::Lanes4>(reinterpret_cast<const float*>(from[j] + offset));
  };
  if constexpr (sizeof(L) == 16) {
    return quad(0);
  } else {
    const auto low = __builtin_shufflevector(quad(0), quad(1), 0, 1, 2, 3, 4, 5, 6, 7);
    if constexpr (sizeof(L) == 32) {
      return low;
    } else {
      const auto high = __builtin_shufflevector(quad(2), quad(3), 0, 1, 2, 3, 4, 5, 6, 7);
      return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,
                                     15);
    }
  }
}

/// Of each four lanes of a and b: the first and second by turns, or the third and fourth.
template <typename L>
DELTAFLASH_INLINE void interleave(L a, L b, L& low, L& high) {
  if constexpr (sizeof(L) == 16) {
    low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
    high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  } else if constexpr (sizeof(L) == 32) {
    low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
    high = __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  } else {
    low = __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    high =
        __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
}

/// Calls use(k, columns) for the kStep columns of the blocks; lane r is of weight row r.
template <typename L, int kVectors, typename T, typename Use>
DELTAFLASH_INLINE void for_each_column(const Block<T> (&blocks)[kVectors], const Use& use) {
  static_assert(std::endian::native == std::endian::little);
  constexpr std::int64_t kCount = 16 / sizeof(T);  // numbers in 16 bytes
#pragma GCC unroll 4
  for (std::int64_t first = 0; first < kStep; first += kCount) {
    L words[kVectors][4];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const Block<T>& block = blocks[v];
      const T* every_fourth[kLanesOf<L> / 4];
#pragma GCC unroll 4
      for (std::int64_t j = 0; j < kLanesOf<L> / 4; ++j) {
        every_fourth[j] = block.rows + 4 * j * block.stride;
        // Hides where the pointer is from: 16 pointers of which each steps along would be spilled.
        asm("" : "+r"(every_fourth[j]));
      }
      L rows[4];
#pragma GCC unroll 4
      for (std::int64_t r = 0; r < 4; ++r) {
        rows[r] = load_quads<L, T>(every_fourth, first + r * block.stride);
      }
      L even[2];
      L odd[2];
      interleave(rows[0], rows[2], even[0], even[1]);
      interleave(rows[1], rows[3], odd[0], odd[1]);
      interleave(even[0], odd[0], words[v][0], words[v][1]);
      interleave(even[1], odd[1], words[v][2], words[v][3]);
    }
    L columns[kVectors];
#pragma GCC unroll 4
    for (std::int64_t w = 0; w < 4; ++w) {
      if constexpr (sizeof(T) == sizeof(float)) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          columns[v] = words[v][w];
        }
        use(first + w, columns);
      } else {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          columns[v] = std::bit_cast<L>(std::bit_cast<Words<L>>(words[v][w]) << 16);
        }
        use(first + 2 * w, columns);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          columns[v] = std::bit_cast<L>(std::bit_cast<Words<L>>(words[v][w]) & 0xffff0000u);
        }
        use(first + 2 * w + 1, columns);
      }
    }
  }
}

/// Stores the first `count` of the lanes, or adds them to what is there.
template <typename L, int kVectors>
DELTAFLASH_INLINE void put(const L (&sums)[kVectors], float* out, std::int64_t count, bool adds) {
  if (count >= kVectors * kLanesOf<L>) [[likely]] {
#pragma GCC unroll 2
    for (std::int64_t v = 0; v < kVectors; ++v) {
      float* to = out + v * kLanesOf<L>;
      simd::store(to, adds ? simd::load<L>(to) + sums[v] : sums[v]);
    }
    return;
  }
  alignas(64) float at[kVectors * kLanesOf<L>];
  for (std::int64_t v = 0; v < kVectors; ++v) {
    simd::store(at + v * kLanesOf<L>, sums[v]);
  }
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = adds ? out[i] + at[i] : at[i];
  }
}

/// The first `count` of the lanes; what the others hold is of no account.
template <typename L>
DELTAFLASH_INLINE void get(const float* out, std::int64_t count, L (&lanes)[2]) {
  if (count >= kWidth<L>) [[likely]] {
    lanes[0] = simd::load<L>(out);
    lanes[1] = simd::load<L>(out + kLanesOf<L>);
    return;
  }
  alignas(64) float at[kWidth<L>] = {};
  std::memcpy(at, out, static_cast<std::size_t>(count) * sizeof(float));
  lanes[0] = simd::load<L>(at);
  lanes[1] = simd::load<L>(at + kLanesOf<L>);
}

/// Copies kStep numbers of a token, or `count` and zeros.
DELTAFLASH_INLINE void copy_step(const float* from, std::int64_t count, float* to) {
  if (count >= kStep) [[likely]] {
    std::memcpy(to, from, kStep * sizeof(float));
  } else {
    std::memset(to, 0, kStep * sizeof(float));
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
  }
}

/// Has part of the weight rows [row, row + num_rows) brought near: a step's share, were they walked
/// from start to end. A processor sees short rows too late to run ahead by itself.
template <typename T>
DELTAFLASH_INLINE void prefetch(const Matrix<T>& matrix, std::int64_t row, std::int64_t k,
                                std::int64_t num_rows) {
  if (row + num_rows > matrix.num_rows) {
    return;
  }
  const T* from = matrix.weight + row * matrix.depth + k * num_rows;
  constexpr std::int64_t kLine = 64 / sizeof(T);
#pragma GCC unroll 32
  for (std::int64_t i = 0; i < num_rows * kStep; i += kLine) {
    __builtin_prefetch(from + i, 0, 2);
  }
}

/// Outputs [row, end_row) of `num_tokens` <= kTokens tokens; x is [steps, kTokens, kStep].
template <typename L, int kTokens, typename T>
DELTAFLASH_INLINE void few_tokens(const Linear& args, const Matrix<T>& matrix, const float* x,
                                  std::int64_t row, std::int64_t end_row) {
  // What fits into 16 registers beside four rows, or into 32.
  constexpr int kVectors = sizeof(L) == 64 || kTokens <= 2 ? 2 : 1;
  constexpr std::int64_t kRows = kVectors * kLanesOf<L>;
  for (; row < end_row; row += kRows) {
    for (std::int64_t begin = 0; begin < matrix.depth; begin += kSum) {
      L sums[kTokens][kVectors] = {};
      for_each_step<L, kVectors>(
          matrix, row, begin, std::min(begin + kSum, matrix.depth),
          [&](std::int64_t k, const Block<T>(&blocks)[kVectors]) DELTAFLASH_INLINE_LAMBDA {
            const float* at = x + k * kTokens;
            prefetch(matrix, row + kRows, k, kRows);
            for_each_column<L>(
                blocks, [&](std::int64_t i, const L(&columns)[kVectors]) DELTAFLASH_INLINE_LAMBDA {
#pragma GCC unroll 8
                  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 2
                    for (int v = 0; v < kVectors; ++v) {
                      sums[t][v] += columns[v] * at[t * kStep + i];
                    }
                  }
                });
          });
#pragma GCC unroll 8
      for (std::int64_t t = 0; t < kTokens; ++t) {
        if (t < args.num_tokens) {
          put(sums[t], args.out + t * args.out_dim + row, end_row - row, begin > 0);
        }
      }
    }
  }
}

/// One thread's panels: [k, kWidth] weights and, in steps of [row, kStep], a tile of tokens.
struct alignas(64) Panels {
  float weights[kPartRows * kDepth];
  float x[kMaxTileRows * kDepth];
};

Panels& panels_of_thread() {
  thread_local const std::unique_ptr<Panels> kPanels(new Panels);
  return *kPanels;
}

template <typename L, typename T>
DELTAFLASH_INLINE void fill_panel(const Matrix<T>& matrix, std::int64_t row, std::int64_t begin,
                                  std::int64_t end, float* panel) {
  for (std::int64_t v = 0; v < 2; ++v) {
    float* to = panel + v * kLanesOf<L>;
    for_each_step<L, 1>(matrix, std::min(row + v * kLanesOf<L>, matrix.num_rows), begin, end,
                        [&](std::int64_t, const Block<T>(&blocks)[1]) DELTAFLASH_INLINE_LAMBDA {
                          for_each_column<L>(blocks,
                                             [&](std::int64_t i, const L(&columns)[1])
                                                 DELTAFLASH_INLINE_LAMBDA {
                                                   simd::store(to + i * kWidth<L>, columns[0]);
                                                 });
                          to += kStep * kWidth<L>;
                        });
  }
}

/// kRows tokens from panel x against one weight panel.
template <typename L, int kRows>
DELTAFLASH_INLINE void tile(const float* x, const float* panel, std::int64_t depth, float* out,
                            std::int64_t out_stride, std::int64_t count, bool adds) {
  L totals[kRows][2] = {};
  if (adds) {
    for (std::int64_t r = 0; r < kRows; ++r) {
      get(out + r * out_stride, count, totals[r]);
    }
  }
  for (std::int64_t begin = 0; begin < depth; begin += kSum) {
    const std::int64_t end = std::min(begin + kSum, depth);
    L sums[kRows][2] = {};
    for (std::int64_t k = begin; k < end; k += kStep, x += kRows * kStep) {
#pragma GCC unroll 4
      for (std::int64_t i = 0; i < kStep; ++i, panel += kWidth<L>) {
        const L low = simd::load<L>(panel);
        const L high = simd::load<L>(panel + kLanesOf<L>);
#pragma GCC unroll 16
        for (std::int64_t r = 0; r < kRows; ++r) {
          const float at = x[r * kStep + i];
          sums[r][0] += low * at;
          sums[r][1] += high * at;
        }
      }
    }
    if (adds || begin > 0) {
#pragma GCC unroll 16
      for (std::int64_t r = 0; r < kRows; ++r) {
        totals[r][0] += sums[r][0];
        totals[r][1] += sums[r][1];
      }
    } else {
      std::memcpy(totals, sums, sizeof(totals));
    }
  }
  for (std::int64_t r = 0; r < kRows; ++r) {
    put(totals[r], out + r * out_stride, count, false);
  }
}

/// Copies kRows tokens to panel x and multiplies them with all weight panels.
template <typename L, int kRows>
DELTAFLASH_INLINE void tile_row(const Linear& args, std::int64_t token, std::int64_t begin,
                                std::int64_t end, std::int64_t row, std::int64_t num_rows,
                                Panels& panels) {
  const float* from = args.x + token * args.in_dim;
  for (std::int64_t k = begin; k < end; k += kStep) {
#pragma GCC unroll 16
    for (std::int64_t r = 0; r < kRows; ++r) {
      copy_step(from + r * args.in_dim + k, end - k, panels.x + (k - begin) * kRows + r * kStep);
    }
  }
  const std::int64_t depth = simd::round_up(end - begin, kStep);
  for (std::int64_t n = 0; n < num_rows; n += kWidth<L>) {
    tile<L, kRows>(panels.x, panels.weights + n * kDepth, depth,
                   args.out + token * args.out_dim + row + n, args.out_dim, num_rows - n,
                   begin > 0);
  }
}

/// Tokens [token, end_token) against the weight rows [row, row + num_rows), at most kPartRows.
template <typename L, typename T>
DELTAFLASH_INLINE void many_tokens(const Linear& args, const Matrix<T>& matrix, std::int64_t row,
                                   std::int64_t num_rows, std::int64_t token,
                                   std::int64_t end_token) {
  Panels& panels = panels_of_thread();
  for (std::int64_t begin = 0; begin < args.in_dim; begin += kDepth) {
    const std::int64_t end = std::min(begin + kDepth, args.in_dim);
    for (std::int64_t n = 0; n < num_rows; n += kWidth<L>) {
      fill_panel<L>(matrix, row + n, begin, end, panels.weights + n * kDepth);
    }
    constexpr int kRows = kTileRows<L>;
    std::int64_t t = token;
    for (; t + kRows <= end_token; t += kRows) {
      tile_row<L, kRows>(args, t, begin, end, row, num_rows, panels);
    }
    if constexpr (kRows > 8) {
      for (; t + 8 <= end_token; t += 8) {
        tile_row<L, 8>(args, t, begin, end, row, num_rows, panels);
      }
    }
    if constexpr (kRows > 4) {
      for (; t + 4 <= end_token; t += 4) {
        tile_row<L, 4>(args, t, begin, end, row, num_rows, panels);
      }
    }
    for (; t + 2 <= end_token; t += 2) {
      tile_row<L, 2>(args, t, begin, end, row, num_rows, panels);
    }
    for (; t < end_token; ++t) {
      tile_row<L, 1>(args, t, begin, end, row, num_rows, panels);
    }
  }
}

template <typename T>
void run_few(const Linear& args, Stream stream) {
  const Matrix<T> matrix{static_cast<const T*>(args.weight), args.out_dim, args.in_dim};
  dispatch_at_least<1, 2, 4, 8>(args.num_tokens, [&](auto tokens) {
    constexpr int kTokens = tokens;
    simd::Scratch scratch(kTokens * simd::round_up(args.in_dim, kStep));
    float* x = scratch.take(kTokens * simd::round_up(args.in_dim, kStep));
    for (std::int64_t k = 0; k < args.in_dim; k += kStep) {
      for (std::int64_t t = 0; t < kTokens; ++t) {
        copy_step(args.x + t * args.in_dim + k, t < args.num_tokens ? args.in_dim - k : 0,
                  x + k * kTokens + t * kStep);
      }
    }
    const std::int64_t blocks = share(args.out_dim, kBlockRows);
    const std::int64_t grain =
        std::max<std::int64_t>(1, kGrain / (kTokens * args.in_dim * kBlockRows));
    parallel_for(stream, blocks, grain, [&](std::int64_t begin, std::int64_t end) {
      simd::for_machine([&](auto tag) DELTAFLASH_INLINE_LAMBDA {
        few_tokens<typename decltype(tag)::type, kTokens>(args, matrix, x, begin * kBlockRows,
                                                          std::min(end * kBlockRows, args.out_dim));
      });
    });
  });
}

template <typename T>
void run_many(const Linear& args, Stream stream) {
  const Matrix<T> matrix{static_cast<const T*>(args.weight), args.out_dim, args.in_dim};
  const std::int64_t threads =
      stream.handle == nullptr ? 1 : static_cast<ThreadPool*>(stream.handle)->num_threads();
  // Each part turns its weights itself, so tokens are split only where the outputs do not suffice.
  const std::int64_t rows =
      simd::round_up(share(args.out_dim, (args.out_dim + kPartRows - 1) / kPartRows), kBlockRows);
  const std::int64_t row_parts = (args.out_dim + rows - 1) / rows;
  const std::int64_t most = std::max<std::int64_t>(1, args.num_tokens / kMinPartTokens);
  const std::int64_t wanted = row_parts % threads == 0 ? 1 : (4 * threads - 1) / row_parts + 1;
  const std::int64_t tokens =
      simd::round_up(share(args.num_tokens, std::min(most, wanted)), kMaxTileRows);
  const std::int64_t token_parts = (args.num_tokens + tokens - 1) / tokens;
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / (rows * tokens * args.in_dim));
  parallel_for(stream, row_parts * token_parts, grain, [&](std::int64_t begin, std::int64_t end) {
    simd::for_machine([&](auto tag) DELTAFLASH_INLINE_LAMBDA {
      using L = typename decltype(tag)::type;
      for (std::int64_t part = begin; part < end; ++part) {
        const std::int64_t row = part / token_parts * rows;
        const std::int64_t token = part % token_parts * tokens;
        many_tokens<L>(args, matrix, row, std::min(rows, args.out_dim - row), token,
                       std::min(token + tokens, args.num_tokens));
      }
    });
  });
}

template <typename T>
void run(const Linear& args, Stream stream) {
  if (args.num_tokens <= kFewTokens) {
    run_few<T>(args, stream);
  } else {
    run_many<T>(args, stream);
  }
}

}  // namespace

void linear(const Linear& args, Stream stream) {
  if (args.num_tokens < 0 || args.in_dim <= 0 || args.out_dim <= 0) {
    throw std::invalid_argument(
        "linear: expected num_tokens >= 0, in_dim > 0 and out_dim > 0, got " +
        std::to_string(args.num_tokens) + ", " + std::to_string(args.in_dim) + " and " +
        std::to_string(args.out_dim));
  }
  if (args.num_tokens == 0) {
    return;
  }
  switch (args.weight_dtype) {
    case DType::kBFloat16:
      return run<BFloat16>(args, stream);
    case DType::kFloat32:
      return run<float>(args, stream);
    case DType::kInt32:
      break;
  }
  throw std::invalid_argument("linear: expected weight_dtype bfloat16 or float32, got " +
                              std::string(name_of(args.weight_dtype)));
}

}  // namespace deltaflash::cpu
