#include "plugins/round_metadata/round_metadata.h"

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"
#include "runtime/bindings/slot_table.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

constexpr const char* kOp = "round_metadata";

void round_metadata(SlotTable table, const Array<const std::int32_t, 1>& row_slots,
                    const Array<const std::int32_t, 1>& row_len,
                    const Array<std::int32_t, 1>& slots, const Array<std::int32_t, 1>& row_start,
                    const Array<std::int32_t, 1>& token_ids,
                    const Array<std::int32_t, 2>& positions,
                    const Array<std::int32_t, 1>& sample_start,
                    const Array<std::int32_t, 1>& sample_len, ThreadPool* pool) {
  const auto num_rows = static_cast<std::int64_t>(row_slots.shape(0));
  const auto num_tokens = static_cast<std::int64_t>(token_ids.shape(0));
  check_shape(kOp, "row_len", row_len, {num_rows});
  check_shape(kOp, "slots", slots, {num_rows});
  check_shape(kOp, "row_start", row_start, {num_rows + 1});
  check_shape(kOp, "positions", positions, {3, num_tokens});
  check_shape(kOp, "sample_start", sample_start, {num_rows});
  check_shape(kOp, "sample_len", sample_len, {num_rows});
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const std::int32_t slot = row_slots.data()[row];
    check_argument(slot >= -1 && slot < table.num_slots, kOp,
                   "expected slots in [-1, " + std::to_string(table.num_slots) + "), found " +
                       std::to_string(slot) + " in row " + std::to_string(row));
    check_argument(row_len.data()[row] >= 0, kOp,
                   "expected row_len >= 0, found " + std::to_string(row_len.data()[row]) +
                       " in row " + std::to_string(row));
  }
  cpu::round_metadata({.table = table.states(kOp),
                       .row_slots = row_slots.data(),
                       .row_len = row_len.data(),
                       .num_rows = num_rows,
                       .num_tokens = num_tokens,
                       .slots = slots.data(),
                       .row_start = row_start.data(),
                       .token_ids = token_ids.data(),
                       .positions = positions.data(),
                       .sample_start = sample_start.data(),
                       .sample_len = sample_len.data()},
                      stream_of(pool));
}

}  // namespace

void bind_round_metadata(nb::module_& plugins) {
  plugins.def(
      kOp, &round_metadata, nb::arg("table"), nb::arg("row_slots"), nb::arg("row_len"),
      nb::arg("slots"), nb::arg("row_start"), nb::arg("token_ids"), nb::arg("positions"),
      nb::arg("sample_start"), nb::arg("sample_len"), nb::arg("pool") = nb::none(),
      nb::call_guard<nb::gil_scoped_release>(),
      "What a round derives from the slot table: where the rows begin, the first token of each\n"
      "[num_tokens], rotary positions [3, num_tokens] and the logits rows to sample.");
}

}  // namespace deltaflash
