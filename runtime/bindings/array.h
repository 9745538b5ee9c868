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

/// A NumPy array argument: rank, layout, device and dtype are part of the type, so nanobind
/// refuses another with a TypeError that names them. Nothing is copied or converted.
template <typename T, std::size_t Rank>
using Array = nanobind::ndarray<T, nanobind::numpy, nanobind::ndim<Rank>, nanobind::c_contig,
                                nanobind::device::cpu>;

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
