#include "plugins/scripted_draft/scripted_draft.h"

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"
#include "runtime/bindings/slot_table.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

constexpr const char* kOp = "scripted_draft";

void scripted_draft(SlotTable table, const Array<const std::int32_t, 2>& forced,
                    const Array<const std::int32_t, 2>& script,
                    const Array<const std::int32_t, 1>& slots,
                    const Array<const std::int32_t, 1>& row_start,
                    const Array<std::int32_t, 1>& token_ids, std::int32_t vocab_size,
                    ThreadPool* pool) {
  const auto max_forced = static_cast<std::int64_t>(forced.shape(1));
  check_shape(kOp, "forced", forced, {table.num_slots, max_forced});
  check_shape(kOp, "script", script, {table.num_slots, max_forced});
  const auto num_tokens = static_cast<std::int64_t>(token_ids.shape(0));
  cpu::scripted_draft({.table = table.states(kOp),
                       .forced = forced.data(),
                       .script = script.data(),
                       .max_forced = max_forced,
                       .rows = row_batch(kOp, slots, row_start, num_tokens, table.num_slots),
                       .token_ids = token_ids.data(),
                       .vocab_size = vocab_size},
                      stream_of(pool));
}

}  // namespace

void bind_scripted_draft(nb::module_& plugins) {
  plugins.def(
      kOp, &scripted_draft, nb::arg("table"), nb::arg("forced"), nb::arg("script"),
      nb::arg("slots"), nb::arg("row_start"), nb::arg("token_ids"), nb::arg("vocab_size"),
      nb::arg("pool") = nb::none(), nb::call_guard<nb::gil_scoped_release>(),
      "Drafts the forced output of each row's slot, right for as many tokens as its script\n"
      "says for the round and wrong behind them, behind the first token of\n"
      "each row of `token_ids` [num_tokens].");
}

}  // namespace deltaflash
