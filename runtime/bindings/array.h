#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "plugins/common/stream.h"
#include "plugins/common/thread_pool.h"

namespace deltaflash {

/// Any of nanobind's arrays as an argument, taken as it is: what does not match is refused with a
/// TypeError that names rank, layout, device and dtype. nanobind alone would convert it, and an op
/// must not write its results into a copy.
template <typename NativeArray>
class Unconverted : public NativeArray {
 public:
  Unconverted() = default;
  explicit Unconverted(const NativeArray& array) : NativeArray(array) {}
};

/// A C-contiguous NumPy array argument.
template <typename T, std::size_t kRank>
using Array = Unconverted<nanobind::ndarray<T, nanobind::numpy, nanobind::ndim<kRank>,
                                            nanobind::c_contig, nanobind::device::cpu>>;

/// A NumPy array argument of any strides.
template <typename T, std::size_t kRank>
using StridedArray = Unconverted<
    nanobind::ndarray<T, nanobind::numpy, nanobind::ndim<kRank>, nanobind::device::cpu>>;

/// In an expected shape: an axis of any size.
constexpr std::int64_t kAnySize = -1;

namespace detail {
inline std::string shape_text(const std::int64_t* shape, std::size_t rank) {
  std::string text = "[";
  for (std::size_t i = 0; i < rank; ++i) {
    text += (i == 0 ? "" : ", ") + (shape[i] == kAnySize ? "any" : std::to_string(shape[i]));
  }
  return text + "]";
}
}  // namespace detail

/// Throws std::invalid_argument (ValueError) unless `array` has the shape `expected`.
template <typename T, std::size_t kRank>
void check_shape(const char* op, const char* name, const Array<T, kRank>& array,
                 const std::int64_t (&expected)[kRank]) {
  std::int64_t found[kRank];
  bool same = true;
  for (std::size_t i = 0; i < kRank; ++i) {
    found[i] = static_cast<std::int64_t>(array.shape(i));
    same = same && (expected[i] == kAnySize || expected[i] == found[i]);
  }
  if (!same) {
    throw std::invalid_argument(std::string(op) + ": expected " + name + " of shape " +
                                detail::shape_text(expected, kRank) + ", found " +
                                detail::shape_text(found, kRank));
  }
}

/// Throws std::invalid_argument (ValueError) with the op's name in front unless `ok`.
inline void check_argument(bool ok, const char* op, const std::string& message) {
  if (!ok) {
    throw std::invalid_argument(std::string(op) + ": " + message);
  }
}

/// The stream of an op's optional `pool` argument; None runs on the calling thread.
inline Stream stream_of(ThreadPool* pool) { return Stream{pool}; }

}  // namespace deltaflash

namespace nanobind::detail {
template <typename NativeArray>
struct type_caster<deltaflash::Unconverted<NativeArray>> {
  using Argument = deltaflash::Unconverted<NativeArray>;
  using NativeCaster = type_caster<NativeArray>;
  NB_TYPE_CASTER(Argument, NativeCaster::Name)

  bool from_python(handle source, std::uint32_t flags, cleanup_list* cleanup) noexcept {
    NativeCaster native;
    if (!native.from_python(source, flags & ~static_cast<std::uint32_t>(cast_flags::convert),
                            cleanup)) {
      return false;
    }
    value = Argument(native.value);
    return true;
  }
};
}  // namespace nanobind::detail
