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

template <typename T, std::size_t Rank>
using NumpyArray = nanobind::ndarray<T, nanobind::numpy, nanobind::ndim<Rank>, nanobind::c_contig,
                                     nanobind::device::cpu>;

/// A NumPy array argument: rank, layout, device and dtype are part of the type, so nanobind
/// refuses another with a TypeError that names them. Unlike nanobind's own type it is never
/// converted: an op must not write its results into a copy.
template <typename T, std::size_t Rank>
class Array : public NumpyArray<T, Rank> {
 public:
  Array() = default;
  explicit Array(const NumpyArray<T, Rank>& array) : NumpyArray<T, Rank>(array) {}
};

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
template <typename T, std::size_t Rank>
void check_shape(const char* op, const char* name, const Array<T, Rank>& array,
                 const std::int64_t (&expected)[Rank]) {
  std::int64_t found[Rank];
  bool same = true;
  for (std::size_t i = 0; i < Rank; ++i) {
    found[i] = static_cast<std::int64_t>(array.shape(i));
    same = same && (expected[i] == kAnySize || expected[i] == found[i]);
  }
  if (!same) {
    throw std::invalid_argument(std::string(op) + ": expected " + name + " of shape " +
                                detail::shape_text(expected, Rank) + ", found " +
                                detail::shape_text(found, Rank));
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
template <typename T, std::size_t Rank>
struct type_caster<deltaflash::Array<T, Rank>> {
  using Argument = deltaflash::Array<T, Rank>;
  using BaseCaster = type_caster<deltaflash::NumpyArray<T, Rank>>;
  NB_TYPE_CASTER(Argument, BaseCaster::Name)

  bool from_python(handle source, std::uint32_t flags, cleanup_list* cleanup) noexcept {
    BaseCaster base;
    if (!base.from_python(source, flags & ~static_cast<std::uint32_t>(cast_flags::convert),
                          cleanup)) {
      return false;
    }
    value = Argument(base.value);
    return true;
  }
};
}  // namespace nanobind::detail
