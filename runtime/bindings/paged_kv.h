#pragma once

#include <string>

#include "plugins/rotary_kv_write/rotary_kv_write.h"
#include "runtime/bindings/array.h"
#include "runtime/bindings/slot_table.h"

namespace deltaflash {

/// The paged KV cache of one layer from its NumPy arrays. T is `float` where it is written and
/// `const float` where it is read.
/// Throws std::invalid_argument (ValueError) for shapes that disagree or a page that is none.
template <typename T>
PagedKv paged_kv(const char* op, const Array<T, 4>& keys, const Array<T, 4>& values,
                 const Array<const std::int32_t, 2>& page_table, std::int64_t num_slots) {
  const auto num_pages = static_cast<std::int64_t>(keys.shape(0));
  const auto num_kv_heads = static_cast<std::int64_t>(keys.shape(1));
  const auto page_size = static_cast<std::int64_t>(keys.shape(2));
  const auto head_dim = static_cast<std::int64_t>(keys.shape(3));
  check_argument(page_size > 0, op, "expected page_size > 0, found 0");
  check_shape(op, "values", values, {num_pages, num_kv_heads, page_size, head_dim});
  check_shape(op, "page_table", page_table, {num_slots, kAnySize});
  const auto max_pages = static_cast<std::int64_t>(page_table.shape(1));
  for (std::int64_t i = 0; i < num_slots * max_pages; ++i) {
    const std::int32_t page = page_table.data()[i];
    check_argument(
        page >= -1 && page < num_pages, op,
        "expected pages in [-1, " + std::to_string(num_pages) + "), found " + std::to_string(page));
  }
  // PagedKv is shared by readers and writers of the cache and holds no const pointers.
  return {.keys = const_cast<float*>(keys.data()),
          .values = const_cast<float*>(values.data()),
          .page_table = page_table.data(),
          .max_pages = max_pages,
          .page_size = page_size,
          .num_kv_heads = num_kv_heads,
          .head_dim = head_dim,
          .dtype = DType::kFloat32};
}

}  // namespace deltaflash
