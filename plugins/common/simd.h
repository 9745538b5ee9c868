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

#include "plugins/common/dtype.h"
#include "plugins/common/instruction_set.h"

// What the CPU twins are vectorised with: 16 float lanes of the compiler's vector extension. A
// function marked DELTAFLASH_SIMD is compiled for AVX-512, for AVX2 and for the base instruction
// set, and the machine's one is chosen when the module is loaded; what it calls from here is
// inlined into it. Results are the same for every caller on one machine, not from one machine to
// another: fused multiply-adds round once, others twice.
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
constexpr std::int64_t kPairs = 2 * kLanes;  // bfloat16 numbers in a vector

using Lanes = float __attribute__((vector_size(64)));
using Lanes8 = float __attribute__((vector_size(32)));
using Lanes4 = float __attribute__((vector_size(16)));
using WordLanes = std::uint32_t __attribute__((vector_size(64)));
using WordLanes8 = std::uint32_t __attribute__((vector_size(32)));
using WordLanes4 = std::uint32_t __attribute__((vector_size(16)));

/// The number of lanes of a vector type.
template <typename L>
constexpr std::int64_t lanes_of = sizeof(L) / sizeof(float);

/// The vector of 32-bit words that is as wide as L.
template <typename L>
using Words = std::conditional_t<sizeof(L) == 64, WordLanes,
                                 std::conditional_t<sizeof(L) == 32, WordLanes8, WordLanes4>>;

constexpr std::int64_t round_up(std::int64_t count, std::int64_t step = kLanes) {
  return (count + step - 1) / step * step;
}

template <typename L = Lanes>
DELTAFLASH_INLINE L broadcast(float value) {
  return L{} + value;
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
  float padded[lanes_of<L>] = {};
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

/// Sums each of 16 vectors over its lanes; lane i of the result is the sum of rows[i]. Every sum
/// has the same order: halves of 8 lanes are added, then of 4, 2 and 1.
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
DELTAFLASH_INLINE float sum(Lanes lanes) {
  float at[kLanes];
  store(at, lanes);
  for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::int64_t i = 0; i < half; ++i) {
      at[i] += at[i + half];
    }
  }
  return at[0];
}

/// e^x within 2 ulp. 0 below -87.3, where the result would be subnormal; infinite above 88.3, just
/// before it would be; NaN stays NaN. Reduction and polynomial of Cephes' expf.
DELTAFLASH_INLINE Lanes exp(Lanes x) {
  constexpr float kLowest = -87.3365448f;
  constexpr float kHighest = 88.3762589f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits
  const Lanes low = broadcast(kLowest);
  const Lanes high = broadcast(kHighest);
  Lanes y = x > high ? high : x;
  y = y < low ? low : y;
  const Lanes shifted = y * 1.44269504088896341f + kRound;
  const Lanes n = shifted - kRound;
  const Lanes r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
  Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const WordLanes exponent = (std::bit_cast<WordLanes>(shifted) << 23) + 0x3f800000u;
  const Lanes result = p * std::bit_cast<Lanes>(exponent);
  const Lanes bounded = x < low ? Lanes{} : result;
  return x > high ? broadcast(std::numeric_limits<float>::infinity()) : bounded;
}

DELTAFLASH_INLINE Lanes silu(Lanes x) { return x / (1.0f + exp(-x)); }

/// kNumX * (16 / kNumX) dot products: lane x * kNumRows + r is the dot of xs[x] and rows[r]. Every
/// dot adds products of indices equal modulo 16 in rising order, then sums the 16 lanes: the bits
/// do not depend on kNumX or on the other vectors. `count` is a multiple of 16.
template <int kNumX>
DELTAFLASH_INLINE Lanes dot_block(const float* const (&rows)[kLanes / kNumX],
                                  const float* const (&xs)[kNumX], std::int64_t count) {
  constexpr int kNumRows = kLanes / kNumX;
  Lanes sums[kLanes] = {};
  for (std::int64_t i = 0; i < count; i += kLanes) {
    Lanes x[kNumX];
#pragma GCC unroll 16
    for (int j = 0; j < kNumX; ++j) {
      x[j] = load(xs[j] + i);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kNumRows; ++r) {
      const Lanes row = load(rows[r] + i);
#pragma GCC unroll 16
      for (int j = 0; j < kNumX; ++j) {
        sums[j * kNumRows + r] += row * x[j];
      }
    }
  }
  return sum_each(sums);
}

/// As above for bfloat16 rows, against x in the order of `split_pairs`: lane l of a sum adds the
/// products of indices 2 l and 2 l + 1 modulo 32. `count` is that of the rows; xs are padded.
template <int kNumX>
DELTAFLASH_INLINE Lanes dot_block(const BFloat16* const (&rows)[kLanes / kNumX],
                                  const float* const (&xs)[kNumX], std::int64_t count) {
  static_assert(std::endian::native == std::endian::little);
  constexpr int kNumRows = kLanes / kNumX;
  Lanes sums[kLanes] = {};
  const std::int64_t whole = count / kPairs * kPairs;
  for (std::int64_t i = 0; i < whole; i += kPairs) {
    Lanes even[kNumX];
    Lanes odd[kNumX];
#pragma GCC unroll 16
    for (int j = 0; j < kNumX; ++j) {
      even[j] = load(xs[j] + i);
      odd[j] = load(xs[j] + i + kLanes);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kNumRows; ++r) {
      WordLanes words;
      std::memcpy(&words, rows[r] + i, sizeof(words));
      const Lanes row_even = std::bit_cast<Lanes>(words << 16);
      const Lanes row_odd = std::bit_cast<Lanes>(words & 0xffff0000u);
#pragma GCC unroll 16
      for (int j = 0; j < kNumX; ++j) {
        sums[j * kNumRows + r] += row_even * even[j];
      }
#pragma GCC unroll 16
      for (int j = 0; j < kNumX; ++j) {
        sums[j * kNumRows + r] += row_odd * odd[j];
      }
    }
  }
  if (whole < count) {
    for (int r = 0; r < kNumRows; ++r) {
      WordLanes words = {};
      std::memcpy(&words, rows[r] + whole,
                  static_cast<std::size_t>(count - whole) * sizeof(BFloat16));
      const Lanes row_even = std::bit_cast<Lanes>(words << 16);
      const Lanes row_odd = std::bit_cast<Lanes>(words & 0xffff0000u);
      for (int j = 0; j < kNumX; ++j) {
        sums[j * kNumRows + r] += row_even * load(xs[j] + whole);
        sums[j * kNumRows + r] += row_odd * load(xs[j] + whole + kLanes);
      }
    }
  }
  return sum_each(sums);
}

/// Reorders x for bfloat16 rows, whose pairs are split by a shift and a mask: of every 32 numbers
/// first the 16 of even index, then those of odd index. Pads with zeros to a multiple of 32.
inline void split_pairs(const float* x, std::int64_t count, float* split) {
  for (std::int64_t i = 0; i < count; i += kPairs) {
    const std::int64_t left = count - i;
    for (std::int64_t l = 0; l < kLanes; ++l) {
      split[i + l] = 2 * l < left ? x[i + 2 * l] : 0.0f;
      split[i + kLanes + l] = 2 * l + 1 < left ? x[i + 2 * l + 1] : 0.0f;
    }
  }
}

/// out[x * out_stride + r] = dot of x[x * x_stride] and rows[r * row_stride], `count` long each,
/// for x < num_x <= kNumX and all r. Absent vectors of a block are filled with present ones.
template <int kNumX, typename T>
DELTAFLASH_INLINE void dot_rows(const T* rows, std::int64_t row_stride, std::int64_t num_rows,
                                const float* x, std::int64_t x_stride, std::int64_t num_x,
                                std::int64_t count, float* out, std::int64_t out_stride) {
  constexpr int kNumRows = kLanes / kNumX;
  const float* xs[kNumX];
  for (int j = 0; j < kNumX; ++j) {
    xs[j] = x + (j < num_x ? j : 0) * x_stride;
  }
  for (std::int64_t row = 0; row < num_rows; row += kNumRows) {
    const std::int64_t left = num_rows - row;
    const T* block[kNumRows];
    for (int r = 0; r < kNumRows; ++r) {
      block[r] = rows + (row + (r < left ? r : 0)) * row_stride;
    }
    float dots[kLanes];
    store(dots, dot_block<kNumX>(block, xs, count));
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
template <typename T>
DELTAFLASH_INLINE void dot_matrix(const T* rows, std::int64_t row_stride, std::int64_t num_rows,
                                  const float* x, std::int64_t x_stride, std::int64_t num_x,
                                  std::int64_t count, float* out, std::int64_t out_stride) {
  std::int64_t j = 0;
  for (; num_x - j >= 3; j += 4) {
    dot_rows<4>(rows, row_stride, num_rows, x + j * x_stride, x_stride,
                num_x - j < 4 ? num_x - j : 4, count, out + j * out_stride, out_stride);
  }
  if (num_x - j == 2) {
    dot_rows<2>(rows, row_stride, num_rows, x + j * x_stride, x_stride, 2, count,
                out + j * out_stride, out_stride);
  } else if (num_x - j == 1) {
    dot_rows<1>(rows, row_stride, num_rows, x + j * x_stride, x_stride, 1, count,
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
