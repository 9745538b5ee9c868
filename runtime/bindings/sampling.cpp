#include "plugins/sampling/sampling.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "plugins/sampling/philox.h"
#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"
#include "runtime/bindings/slot_table.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

constexpr const char* kOp = "sample_accept";

void sample_accept(
    const Array<const float, 2>& logits, SlotTable table, const Array<const std::int32_t, 1>& slots,
    const Array<const std::int32_t, 1>& row_start, const Array<const std::int32_t, 1>& sample_start,
    const Array<const std::int32_t, 1>& sample_len, const Array<const std::int32_t, 1>& token_ids,
    const Array<std::int32_t, 2>& tokens, const Array<std::int32_t, 1>& num_emitted,
    const Array<std::int32_t, 1>& num_accepted, const Array<std::int32_t, 1>& finish_reason,
    const std::optional<Array<const std::int32_t, 2>>& forced,
    const std::optional<Array<const std::uint16_t, 2>>& token_counts,
    const std::optional<Array<const std::int32_t, 2>>& bias_ids,
    const std::optional<Array<const float, 2>>& bias_values, ThreadPool* pool) {
  const auto num_rows = static_cast<std::int64_t>(slots.shape(0));
  const auto num_logits = static_cast<std::int64_t>(logits.shape(0));
  const auto max_emitted = static_cast<std::int64_t>(tokens.shape(1));
  check_argument(max_emitted > 0, kOp, "expected tokens of at least one column, found none");
  check_shape(kOp, "tokens", tokens, {num_rows, max_emitted});
  check_shape(kOp, "sample_start", sample_start, {num_rows});
  check_shape(kOp, "sample_len", sample_len, {num_rows});
  check_shape(kOp, "num_emitted", num_emitted, {num_rows});
  check_shape(kOp, "num_accepted", num_accepted, {num_rows});
  check_shape(kOp, "finish_reason", finish_reason, {num_rows});
  if (forced) {
    check_shape(kOp, "forced", *forced, {table.num_slots, kAnySize});
  }
  const auto vocab_size = static_cast<std::int64_t>(logits.shape(1));
  if (token_counts) {
    check_shape(kOp, "token_counts", *token_counts, {table.num_slots, vocab_size});
  }
  check_argument(bias_ids.has_value() == bias_values.has_value(), kOp,
                 "expected bias_ids and bias_values together, found one");
  if (bias_ids && bias_values) {
    check_shape(kOp, "bias_ids", *bias_ids, {table.num_slots, kMaxLogitBiases});
    check_shape(kOp, "bias_values", *bias_values, {table.num_slots, kMaxLogitBiases});
    const SlotState* states = table.states(kOp);
    for (std::int64_t slot = 0; slot < table.num_slots; ++slot) {
      std::int64_t previous = -1;
      for (std::int64_t i = 0; i < std::min(states[slot].num_biases, kMaxLogitBiases); ++i) {
        const std::int32_t id = bias_ids->data()[slot * kMaxLogitBiases + i];
        check_argument(id > previous && id < vocab_size, kOp,
                       "expected rising bias_ids below " + std::to_string(vocab_size) + ", found " +
                           std::to_string(id) + " after " + std::to_string(previous) + " in slot " +
                           std::to_string(slot));
        previous = id;
      }
    }
  }
  const RowBatch rows = row_batch(kOp, slots, row_start,
                                  static_cast<std::int64_t>(token_ids.shape(0)), table.num_slots);
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const std::int64_t row_len = row_start.data()[row + 1] - row_start.data()[row];
    check_argument(
        rows.slots[row] < 0 || sample_len.data()[row] <= std::max(row_len, std::int64_t{1}), kOp,
        "expected sample_len of at most the row's " + std::to_string(row_len) + " tokens, found " +
            std::to_string(sample_len.data()[row]) + " in row " + std::to_string(row));
    const std::int64_t start = sample_start.data()[row];
    const std::int64_t end = start + sample_len.data()[row];
    check_argument(rows.slots[row] < 0 || start < 0 || end <= num_logits, kOp,
                   "expected sample_start + sample_len of at most " + std::to_string(num_logits) +
                       ", found " + std::to_string(end) + " in row " + std::to_string(row));
  }
  cpu::sample_accept({.logits = logits.data(),
                      .vocab_size = vocab_size,
                      .table = table.states(kOp),
                      .rows = rows,
                      .sample_start = sample_start.data(),
                      .sample_len = sample_len.data(),
                      .token_ids = token_ids.data(),
                      .forced = forced ? forced->data() : nullptr,
                      .max_forced = forced ? static_cast<std::int64_t>(forced->shape(1)) : 0,
                      .token_counts = token_counts ? token_counts->data() : nullptr,
                      .bias_ids = bias_ids ? bias_ids->data() : nullptr,
                      .bias_values = bias_values ? bias_values->data() : nullptr,
                      .max_emitted = max_emitted,
                      .greedy_only = false,
                      .tokens = tokens.data(),
                      .num_emitted = num_emitted.data(),
                      .num_accepted = num_accepted.data(),
                      .finish_reason = finish_reason.data()},
                     stream_of(pool));
}

}  // namespace

void bind_sampling(nb::module_& plugins) {
  plugins.def(kOp, &sample_accept, nb::arg("logits"), nb::arg("table"), nb::arg("slots"),
              nb::arg("row_start"), nb::arg("sample_start"), nb::arg("sample_len"),
              nb::arg("token_ids"), nb::arg("tokens"), nb::arg("num_emitted"),
              nb::arg("num_accepted"), nb::arg("finish_reason"), nb::arg("forced") = nb::none(),
              nb::arg("token_counts") = nb::none(), nb::arg("bias_ids") = nb::none(),
              nb::arg("bias_values") = nb::none(), nb::arg("pool") = nb::none(),
              nb::call_guard<nb::gil_scoped_release>(),
              "Samples `logits` [num_logits, vocab_size] at every position of a row, accepts the\n"
              "drafts that agree and writes what the row emits into `tokens` [num_rows,\n"
              "max_emitted], `num_emitted`, `num_accepted` and `finish_reason` [num_rows].\n"
              "Rules of the slots: `token_counts` uint16 [num_slots, vocab_size], `bias_ids` and\n"
              "`bias_values` [num_slots, MAX_LOGIT_BIASES].");
  plugins.def("stream_uniform", &stream_uniform, nb::arg("seed"), nb::arg("index"), nb::arg("lane"),
              "The uniform number in [0, 1) of stream `seed` at `index`.");
  plugins.def("philox4x32", &philox4x32, nb::arg("counter"), nb::arg("key"),
              "One block of the generator Philox4x32-10.");
}

}  // namespace deltaflash
