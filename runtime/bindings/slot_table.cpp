#include "runtime/bindings/slot_table.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <string>

#include "runtime/bindings/bindings.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

struct Field {
  const char* name;
  const char* format;
  std::size_t offset;
};

constexpr Field kFields[] = {
    {"last_token", "<i4", offsetof(SlotState, last_token)},
    {"kv_len", "<i4", offsetof(SlotState, kv_len)},
    {"rope_delta", "<i4", offsetof(SlotState, rope_delta)},
    {"ring_base", "<i4", offsetof(SlotState, ring_base)},
    {"ring_history", "<i4", offsetof(SlotState, ring_history)},
    {"num_emitted", "<i4", offsetof(SlotState, num_emitted)},
    {"num_remaining", "<i4", offsetof(SlotState, num_remaining)},
    {"finish_reason", "<i4", offsetof(SlotState, finish_reason)},
    {"num_rounds", "<i4", offsetof(SlotState, num_rounds)},
    {"num_forced", "<i4", offsetof(SlotState, num_forced)},
    {"num_script", "<i4", offsetof(SlotState, num_script)},
    {"num_end_ids", "<i4", offsetof(SlotState, num_end_ids)},
    {"end_ids", "", offsetof(SlotState, end_ids)},
    {"temperature", "<f4", offsetof(SlotState, temperature)},
    {"top_p", "<f4", offsetof(SlotState, top_p)},
    {"min_p", "<f4", offsetof(SlotState, min_p)},
    {"top_k", "<i4", offsetof(SlotState, top_k)},
    {"seed", "<u8", offsetof(SlotState, seed)},
    {"repetition_penalty", "<f4", offsetof(SlotState, repetition_penalty)},
    {"presence_penalty", "<f4", offsetof(SlotState, presence_penalty)},
    {"frequency_penalty", "<f4", offsetof(SlotState, frequency_penalty)},
    {"num_biases", "<i4", offsetof(SlotState, num_biases)},
    {"min_tokens", "<i4", offsetof(SlotState, min_tokens)},
    {"forced_drafts", "<i2", offsetof(SlotState, forced_drafts)},
    {"num_logprobs", "<i2", offsetof(SlotState, num_logprobs)},
};

nb::object slot_table_dtype() {
  nb::list names;
  nb::list formats;
  nb::list offsets;
  for (const Field& field : kFields) {
    names.append(field.name);
    if (field.offset == offsetof(SlotState, end_ids)) {
      formats.append(nb::make_tuple("<i4", nb::make_tuple(kMaxEndIds)));
    } else {
      formats.append(field.format);
    }
    offsets.append(field.offset);
  }
  nb::dict layout;
  layout["names"] = names;
  layout["formats"] = formats;
  layout["offsets"] = offsets;
  layout["itemsize"] = sizeof(SlotState);
  return nb::module_::import_("numpy").attr("dtype")(layout);
}

nb::object make_slot_table(std::int64_t num_slots) {
  check_argument(num_slots >= 0, "make_slot_table",
                 "expected num_slots >= 0, found " + std::to_string(num_slots));
  constexpr std::align_val_t kAlignment{alignof(SlotState)};
  const std::size_t rows = static_cast<std::size_t>(num_slots);
  void* memory = ::operator new(rows * sizeof(SlotState), kAlignment);
  std::memset(memory, 0, rows * sizeof(SlotState));
  const nb::capsule owner(memory,
                          [](void* pointer) noexcept { ::operator delete(pointer, kAlignment); });
  const nb::ndarray<std::uint8_t, nb::numpy, nb::ndim<1>> bytes(memory, {rows * sizeof(SlotState)},
                                                                owner);
  return nb::cast(bytes).attr("view")(slot_table_dtype());
}

}  // namespace

SlotState* SlotTable::states(const char* op) const {
  check_argument(reinterpret_cast<std::uintptr_t>(data) % alignof(SlotState) == 0, op,
                 "expected a slot table aligned to " + std::to_string(alignof(SlotState)) +
                     " bytes, as make_slot_table returns, found another alignment");
  return static_cast<SlotState*>(data);
}

bool read_slot_table(nb::handle source, SlotTable& table) noexcept {
  Py_buffer view;
  if (PyObject_GetBuffer(source.ptr(), &view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) != 0) {
    PyErr_Clear();
    return false;
  }
  constexpr Py_ssize_t kBytes = sizeof(SlotState);
  const bool records = view.ndim == 1 && view.itemsize == kBytes;
  const bool bytes = view.ndim == 2 && view.itemsize == 1 && view.shape[1] == kBytes;
  if (records || bytes) {
    table.data = view.buf;
    table.num_slots = view.shape[0];
  }
  PyBuffer_Release(&view);  // the argument itself keeps the memory for the length of the call
  return records || bytes;
}

RowBatch row_batch(const char* op, const Array<const std::int32_t, 1>& slots,
                   const Array<const std::int32_t, 1>& row_start, std::int64_t num_tokens,
                   std::int64_t num_slots) {
  const std::int64_t num_rows = static_cast<std::int64_t>(slots.shape(0));
  check_shape(op, "row_start", row_start, {num_rows + 1});
  const std::int32_t* starts = row_start.data();
  std::int64_t previous = 0;
  std::int64_t max_row_tokens = 0;
  for (std::int64_t row = 0; row <= num_rows; ++row) {
    check_argument(starts[row] >= previous && starts[row] <= num_tokens, op,
                   "expected row_start to rise within [0, " + std::to_string(num_tokens) +
                       "], found " + std::to_string(starts[row]) + " after " +
                       std::to_string(previous));
    max_row_tokens = row > 0 ? std::max(max_row_tokens, starts[row] - previous) : 0;
    previous = starts[row];
  }
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const std::int32_t slot = slots.data()[row];
    check_argument(
        slot >= -1 && slot < num_slots, op,
        "expected slots in [-1, " + std::to_string(num_slots) + "), found " + std::to_string(slot));
  }
  return RowBatch{.slots = slots.data(),
                  .row_start = starts,
                  .num_rows = num_rows,
                  .num_tokens = num_tokens,
                  .max_row_tokens = max_row_tokens};
}

void bind_slot_table(nb::module_& plugins) {
  plugins.attr("MAX_END_IDS") = kMaxEndIds;
  plugins.attr("MAX_LOGIT_BIASES") = kMaxLogitBiases;
  plugins.attr("MAX_TOP_LOGPROBS") = kMaxTopLogprobs;
  plugins.def("slot_table_dtype", &slot_table_dtype,
              nb::sig("def slot_table_dtype() -> numpy.dtype[numpy.void]"),
              "The NumPy dtype of one entry of the slot table, laid out as SlotState.");
  plugins.def("make_slot_table", &make_slot_table, nb::arg("num_slots"),
              nb::sig("def make_slot_table(num_slots: int) -> numpy.typing.NDArray[numpy.void]"),
              "A zeroed slot table [num_slots], aligned as the ops need it.");
}

}  // namespace deltaflash
