#pragma once

#include <cstdint>

#include "plugins/common/slot_table.h"

namespace deltaflash {

/// The row that owns a packed token; -1 for the padding tokens behind the last row.
__device__ __forceinline__ std::int64_t row_of_token(const std::int32_t* row_start,
                                                     std::int64_t num_rows, std::int64_t token) {
  if (num_rows == 0 || token >= row_start[num_rows]) {
    return -1;
  }
  std::int64_t low = 0;  // row_start[low] <= token < row_start[high]
  std::int64_t high = num_rows;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    if (row_start[middle] <= token) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace deltaflash
