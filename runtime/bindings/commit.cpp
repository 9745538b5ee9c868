#include "plugins/commit/commit.h"

#include <limits>
#include <string>

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"
#include "runtime/bindings/slot_table.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

constexpr const char* kOp = "commit_round";

void commit_round(SlotTable table, const Array<const std::int32_t, 1>& slots,
                  const Array<const std::int32_t, 1>& row_start,
                  const Array<const std::int32_t, 2>& tokens,
                  const Array<const std::int32_t, 1>& num_emitted,
                  const Array<const std::int32_t, 1>& finish_reason, std::int64_t ring_rows,
                  std::int64_t history_limit, bool prefill, ThreadPool* pool) {
  const auto num_rows = static_cast<std::int64_t>(slots.shape(0));
  const auto max_emitted = static_cast<std::int64_t>(tokens.shape(1));
  check_shape(kOp, "tokens", tokens, {num_rows, max_emitted});
  check_shape(kOp, "num_emitted", num_emitted, {num_rows});
  check_shape(kOp, "finish_reason", finish_reason, {num_rows});
  constexpr std::int64_t kAnyTokens = std::numeric_limits<std::int32_t>::max();
  const RowBatch rows = row_batch(kOp, slots, row_start, kAnyTokens, table.num_slots);
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const std::int32_t emitted = num_emitted.data()[row];
    check_argument(rows.slots[row] < 0 || (emitted >= 0 && emitted <= max_emitted), kOp,
                   "expected num_emitted in [0, " + std::to_string(max_emitted) + "], found " +
                       std::to_string(emitted) + " in row " + std::to_string(row));
  }
  cpu::commit_round({.table = table.states(kOp),
                     .rows = rows,
                     .tokens = tokens.data(),
                     .max_emitted = max_emitted,
                     .num_emitted = num_emitted.data(),
                     .finish_reason = finish_reason.data(),
                     .ring_rows = ring_rows,
                     .history_limit = history_limit,
                     .prefill = prefill},
                    stream_of(pool));
}

}  // namespace

void bind_commit(nb::module_& plugins) {
  plugins.def(kOp, &commit_round, nb::arg("table"), nb::arg("slots"), nb::arg("row_start"),
              nb::arg("tokens"), nb::arg("num_emitted"), nb::arg("finish_reason"),
              nb::arg("ring_rows"), nb::arg("history_limit"), nb::arg("prefill"),
              nb::arg("pool") = nb::none(), nb::call_guard<nb::gil_scoped_release>(),
              "Moves the cursors of every row's slot in `table` by what the step committed:\n"
              "`tokens` [num_rows, max_emitted], `num_emitted` and `finish_reason` [num_rows].");
}

}  // namespace deltaflash
