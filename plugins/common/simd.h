#pragma once

#include <bit>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>

#include "plugins/common/instruction_set.h"

// What the CPU twins are vectorised with: float lanes of the compiler's vector extension. What is
// given to `for_machine` is compiled for AVX-512, for AVX2 and for the base instruction set, with
// vectors as wide as registers are there. A function marked DELTAFLASH_SIMD is compiled three times
// too, but always with 16 lanes (`Lanes`): that suits short functions alone, since a vector that is
// wider than registers lives in memory. Results are the same for every caller on one machine, not
// from one machine to another: fused multiply-adds round once, others twice.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define DELTAFLASH_SIMD \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DELTAFLASH_SIMD
#endif

#define DELTAFLASH_INLINE [[gnu::always_inline]] inline

// Stands behind the parameters of a lambda: what `for_machine` is given must be inlined.
#define DELTAFLASH_INLINE_LAMBDA __attribute__((always_inline))

namespace deltaflash::simd {

constexpr std::int64_t kLanes = 16;

using Lanes = float __attribute__((vector_size(64)));
using Lanes8 = float __attribute__((vector_size(32)));
using Lanes4 = float __attribute__((vector_size(16)));
using WordLanes = std::uint32_t __attribute__((vector_size(64)));
using WordLanes8 = std::uint32_t __attribute__((vector_size(32)));
using WordLanes4 = std::uint32_t __attribute__((vector_size(16)));

/// The number of lanes of a vector type.
template <typename L>
constexpr std::int64_t kLanesOf = sizeof(L) / sizeof(float);

/// The vector of 32-bit words that is as wide as L.
template <typename L>
using Words = std::conditional_t<sizeof(L) == 64, WordLanes,
                                 std::conditional_t<sizeof(L) == 32, WordLanes8, WordLanes4>>;

constexpr std::int64_t round_up(std::int64_t count, std::int64_t step = kLanes) {
  return (count + step - 1) / step * step;
}

template <typename L = Lanes>
DELTAFLASH_INLINE L broadcast(float value) {
  return value - L{};  // unlike a sum with zeros, no operation
}

template <typename L = Lanes>
DELTAFLASH_INLINE L load(const float* from) {
  L lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

/// The first `count` lanes, less than all, and zeros in the others; reads nothing beyond them.
template <typename L = Lanes>
DELTAFLASH_INLINE L load(const float* from, std::int64_t count) {
  float padded[kLanesOf<L>] = {};
  std::memcpy(padded, from, static_cast<std::size_t>(count) * sizeof(float));
  return load<L>(padded);
}

template <typename L>
DELTAFLASH_INLINE void store(float* to, L lanes) {
  std::memcpy(to, &lanes, sizeof(lanes));
}

template <typename L>
DELTAFLASH_INLINE void store(float* to, L lanes, std::int64_t count) {
  std::memcpy(to, &lanes, static_cast<std::size_t>(count) * sizeof(float));
}

namespace detail {

template <typename Body>
__attribute__((noinline)) void run_base(const Body& body) {
  body(std::type_identity<Lanes4>{});
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
template <typename Body>
__attribute__((noinline, target("arch=x86-64-v3"))) void run_avx2(const Body& body) {
  body(std::type_identity<Lanes8>{});
}

template <typename Body>
__attribute__((noinline, target("arch=x86-64-v4"))) void run_avx512(const Body& body) {
  body(std::type_identity<Lanes>{});
}
#endif

}  // namespace detail

/// Calls `body`, a DELTAFLASH_INLINE_LAMBDA, with std::type_identity of the machine's vector type;
/// it is compiled once for each instruction set. Everything it calls is to be inlined.
template <typename Body>
void for_machine(const Body& body) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  switch (instruction_set()) {
    case InstructionSet::kAvx512:
      return detail::run_avx512(body);
    case InstructionSet::kAvx2:
      return detail::run_avx2(body);
    case InstructionSet::kBase:
      break;
  }
#endif
  detail::run_base(body);
}

/// Sums each of a square of vectors over its lanes; lane i of the result is the sum of rows[i].
/// Every sum has the same order: the upper half of the lanes is added to the lower, then of that.
DELTAFLASH_INLINE Lanes4 sum_each(const Lanes4 (&rows)[4]) {
  Lanes4 by2[2];
  for (int i = 0; i < 2; ++i) {
    by2[i] = __builtin_shufflevector(rows[i], rows[i + 2], 0, 1, 4, 5) +
             __builtin_shufflevector(rows[i], rows[i + 2], 2, 3, 6, 7);
  }
  return __builtin_shufflevector(by2[0], by2[1], 0, 4, 2, 6) +
         __builtin_shufflevector(by2[0], by2[1], 1, 5, 3, 7);
}

DELTAFLASH_INLINE Lanes8 sum_each(const Lanes8 (&rows)[8]) {
  Lanes8 by4[4];
  for (int i = 0; i < 4; ++i) {
    by4[i] = __builtin_shufflevector(rows[i], rows[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) +
             __builtin_shufflevector(rows[i], rows[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
  Lanes8 by2[2];
  for (int i = 0; i < 2; ++i) {
    by2[i] = __builtin_shufflevector(by4[i], by4[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) +
             __builtin_shufflevector(by4[i], by4[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
  }
  return __builtin_shufflevector(by2[0], by2[1], 0, 8, 2, 10, 4, 12, 6, 14) +
         __builtin_shufflevector(by2[0], by2[1], 1, 9, 3, 11, 5, 13, 7, 15);
}

DELTAFLASH_INLINE Lanes sum_each(const Lanes (&rows)[kLanes]) {
  Lanes by8[8];
  for (int i = 0; i < 8; ++i) {
    by8[i] = __builtin_shufflevector(rows[i], rows[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19,
                                     20, 21, 22, 23) +
             __builtin_shufflevector(rows[i], rows[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26,
                                     27, 28, 29, 30, 31);
  }
  Lanes by4[4];
  for (int i = 0; i < 4; ++i) {
    by4[i] = __builtin_shufflevector(by8[i], by8[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11,
                                     24, 25, 26, 27) +
             __builtin_shufflevector(by8[i], by8[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15,
                                     28, 29, 30, 31);
  }
  Lanes by2[2];
  for (int i = 0; i < 2; ++i) {
    by2[i] = __builtin_shufflevector(by4[i], by4[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25,
                                     12, 13, 28, 29) +
             __builtin_shufflevector(by4[i], by4[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27,
                                     14, 15, 30, 31);
  }
  return __builtin_shufflevector(by2[0], by2[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28,
                                 14, 30) +
         __builtin_shufflevector(by2[0], by2[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29,
                                 15, 31);
}

/// The sum over the lanes, in the order of `sum_each`.
template <typename L>
DELTAFLASH_INLINE float sum(L lanes) {
  float at[kLanesOf<L>];
  store(at, lanes);
  for (std::int64_t half = kLanesOf<L> / 2; half > 0; half /= 2) {
    for (std::int64_t i = 0; i < half; ++i) {
      at[i] += at[i + half];
    }
  }
  return at[0];
}

/// e^x within 2 ulp. 0 below -87.3, where the result would be subnormal; infinite above 88.3, just
/// before it would be; NaN stays NaN. Reduction and polynomial of Cephes' expf.
template <typename L>
DELTAFLASH_INLINE L exp(L x) {
  constexpr float kLowest = -87.3365448f;
  constexpr float kHighest = 88.3762589f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits
  const L low = broadcast<L>(kLowest);
  const L high = broadcast<L>(kHighest);
  L y = x > high ? high : x;
  y = y < low ? low : y;
  const L shifted = y * 1.44269504088896341f + kRound;
  const L n = shifted - kRound;
  const L r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
  L p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Words<L> exponent = (std::bit_cast<Words<L>>(shifted) << 23) + 0x3f800000u;
  const L result = p * std::bit_cast<L>(exponent);
  const L bounded = x < low ? L{} : result;
  return x > high ? broadcast<L>(std::numeric_limits<float>::infinity()) : bounded;
}

template <typename L>
DELTAFLASH_INLINE L silu(L x) {
  return x / (1.0f + exp(-x));
}

/// As many dot products as L has lanes, kNumX times kNumRows of them: lane x * kNumRows + r is the
/// dot of xs[x] and rows[r]. Every dot adds products of indices equal modulo the lanes in rising
/// order, then sums the lanes: the bits do not depend on kNumX or on the other vectors. `count` is
/// a multiple of the lanes.
template <typename L, int kNumX>
DELTAFLASH_INLINE L dot_block(const float* const (&rows)[kLanesOf<L> / kNumX],
                              const float* const (&xs)[kNumX], std::int64_t count) {
  constexpr int kNumRows = kLanesOf<L> / kNumX;
  L sums[kLanesOf<L>] = {};
  for (std::int64_t i = 0; i < count; i += kLanesOf<L>) {
    L x[kNumX];
#pragma GCC unroll 16
    for (int j = 0; j < kNumX; ++j) {
      x[j] = load<L>(xs[j] + i);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kNumRows; ++r) {
      const L row = load<L>(rows[r] + i);
#pragma GCC unroll 16
      for (int j = 0; j < kNumX; ++j) {
        sums[j * kNumRows + r] += row * x[j];
      }
    }
  }
  return sum_each(sums);
}

/// out[x * out_stride + r] = dot of x[x * x_stride] and rows[r * row_stride], `count` long each,
/// for x < num_x <= kNumX and all r. Absent vectors of a block are filled with present ones.
template <typename L, int kNumX>
DELTAFLASH_INLINE void dot_rows(const float* rows, std::int64_t row_stride, std::int64_t num_rows,
                                const float* x, std::int64_t x_stride, std::int64_t num_x,
                                std::int64_t count, float* out, std::int64_t out_stride) {
  constexpr int kNumRows = kLanesOf<L> / kNumX;
  const float* xs[kNumX];
  for (int j = 0; j < kNumX; ++j) {
    xs[j] = x + (j < num_x ? j : 0) * x_stride;
  }
  for (std::int64_t row = 0; row < num_rows; row += kNumRows) {
    const std::int64_t left = num_rows - row;
    const float* block[kNumRows];
    for (int r = 0; r < kNumRows; ++r) {
      block[r] = rows + (row + (r < left ? r : 0)) * row_stride;
    }
    float dots[kLanesOf<L>];
    store(dots, dot_block<L, kNumX>(block, xs, count));
    for (std::int64_t j = 0; j < num_x; ++j) {
      float* to = out + j * out_stride + row;
      if (left >= kNumRows) {
        std::memcpy(to, dots + j * kNumRows, kNumRows * sizeof(float));
      } else {
        std::memcpy(to, dots + j * kNumRows, static_cast<std::size_t>(left) * sizeof(float));
      }
    }
  }
}

/// As `dot_rows`, for any num_x.
template <typename L>
DELTAFLASH_INLINE void dot_matrix(const float* rows, std::int64_t row_stride, std::int64_t num_rows,
                                  const float* x, std::int64_t x_stride, std::int64_t num_x,
                                  std::int64_t count, float* out, std::int64_t out_stride) {
  std::int64_t j = 0;
  for (; num_x - j >= 3; j += 4) {
    dot_rows<L, 4>(rows, row_stride, num_rows, x + j * x_stride, x_stride,
                   num_x - j < 4 ? num_x - j : 4, count, out + j * out_stride, out_stride);
  }
  if (num_x - j == 2) {
    dot_rows<L, 2>(rows, row_stride, num_rows, x + j * x_stride, x_stride, 2, count,
                   out + j * out_stride, out_stride);
  } else if (num_x - j == 1) {
    dot_rows<L, 1>(rows, row_stride, num_rows, x + j * x_stride, x_stride, 1, count,
                   out + j * out_stride, out_stride);
  }
}

/// Scratch floats on a cache line border, not initialised.
class Scratch {
 public:
  explicit Scratch(std::int64_t count)
      : size_(count),
        data_(static_cast<float*>(::operator new(static_cast<std::size_t>(count) * sizeof(float),
                                                 std::align_val_t{64}))) {}

  /// The next `count` floats, rounded up to whole vectors.
  float* take(std::int64_t count) {
    float* taken = data_.get() + used_;
    used_ += round_up(count);
    assert(used_ <= size_);
    return taken;
  }

 private:
  struct Free {
    void operator()(float* data) const { ::operator delete(data, std::align_val_t{64}); }
  };
  std::int64_t size_;
  std::unique_ptr<float, Free> data_;
  std::int64_t used_ = 0;
};

}  // namespace deltaflash::simd
