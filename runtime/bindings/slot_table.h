#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "plugins/common/slot_table.h"
#include "runtime/bindings/array.h"

namespace deltaflash {

/// A slot table argument: a C-contiguous array of `slot_table_dtype()` and shape [num_slots], or
/// its bytes as uint8 [num_slots, sizeof(SlotState)]. The array keeps the memory; a call holds it.
struct SlotTable {
  void* data = nullptr;
  std::int64_t num_slots = 0;

  /// Throws std::invalid_argument (ValueError) if the memory is not aligned for a SlotState.
  SlotState* states(const char* op) const;
};

/// Reads the table argument's buffer; false (a TypeError) if it is none of the above.
bool read_slot_table(nanobind::handle source, SlotTable& table) noexcept;

/// The rows of a step from `slots` [num_rows] and `row_start` [num_rows + 1].
/// Throws std::invalid_argument (ValueError) for a slot outside [-1, num_slots) or row starts that
/// fall, or that do not lie in [0, num_tokens].
RowBatch row_batch(const char* op, const Array<const std::int32_t, 1>& slots,
                   const Array<const std::int32_t, 1>& row_start, std::int64_t num_tokens,
                   std::int64_t num_slots);

}  // namespace deltaflash

namespace nanobind::detail {
template <>
struct type_caster<deltaflash::SlotTable> {
  NB_TYPE_CASTER(deltaflash::SlotTable, const_name("numpy.typing.NDArray[numpy.void]"))

  bool from_python(handle source, std::uint32_t /*flags*/, cleanup_list* /*cleanup*/) noexcept {
    return deltaflash::read_slot_table(source, value);
  }
};
}  // namespace nanobind::detail
