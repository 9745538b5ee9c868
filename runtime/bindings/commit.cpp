#include "plugins/commit/commit.h"

#include <nanobind/stl/optional.h>

#include <limits>
#include <optional>
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
                  std::int64_t history_limit, bool prefill,
                  const std::optional<Array<std::uint16_t, 2>>& token_counts, ThreadPool* pool) {
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
  if (token_counts) {
    check_shape(kOp, "token_counts", *token_counts, {table.num_slots, kAnySize});
    const auto vocab_size = static_cast<std::int32_t>(token_counts->shape(1));
    for (std::int64_t row = 0; row < num_rows; ++row) {
      for (std::int64_t i = 0; rows.slots[row] >= 0 && i < num_emitted.data()[row]; ++i) {
        const std::int32_t token = tokens.data()[row * max_emitted + i];
        check_argument(token >= 0 && token < vocab_size, kOp,
                       "expected tokens in [0, " + std::to_string(vocab_size) + "), found " +
                           std::to_string(token) + " in row " + std::to_string(row));
      }
    }
  }
  cpu::commit_round(
      {.table = table.states(kOp),
       .rows = rows,
       .tokens = tokens.data(),
       .max_emitted = max_emitted,
       .num_emitted = num_emitted.data(),
       .finish_reason = finish_reason.data(),
       .token_counts = token_counts ? token_counts->data() : nullptr,
       .vocab_size = token_counts ? static_cast<std::int64_t>(token_counts->shape(1)) : 0,
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
              nb::arg("token_counts") = nb::none(), nb::arg("pool") = nb::none(),
              nb::call_guard<nb::gil_scoped_release>(),
              "Moves the cursors of every row's slot in `table` by what the step committed:\n"
              "`tokens` [num_rows, max_emitted], `num_emitted` and `finish_reason` [num_rows].\n"
              "`token_counts` uint16 [num_slots, vocab_size] follows for slots with penalties.");
}

}  // namespace deltaflash
