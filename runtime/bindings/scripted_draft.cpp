#include "plugins/scripted_draft/scripted_draft.h"

#include <limits>

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
                    const Array<std::int32_t, 2>& draft_ids, std::int32_t vocab_size,
                    ThreadPool* pool) {
  const auto max_forced = static_cast<std::int64_t>(forced.shape(1));
  check_shape(kOp, "forced", forced, {table.num_slots, max_forced});
  check_shape(kOp, "script", script, {table.num_slots, max_forced});
  check_shape(kOp, "draft_ids", draft_ids, {table.num_slots, kAnySize});
  constexpr std::int64_t kAnyTokens = std::numeric_limits<std::int32_t>::max();
  cpu::scripted_draft({.table = table.states(kOp),
                       .forced = forced.data(),
                       .script = script.data(),
                       .max_forced = max_forced,
                       .rows = row_batch(kOp, slots, row_start, kAnyTokens, table.num_slots),
                       .draft_ids = draft_ids.data(),
                       .max_draft = static_cast<std::int64_t>(draft_ids.shape(1)),
                       .vocab_size = vocab_size},
                      stream_of(pool));
}

}  // namespace

void bind_scripted_draft(nb::module_& plugins) {
  plugins.def(
      kOp, &scripted_draft, nb::arg("table"), nb::arg("forced").noconvert(),
      nb::arg("script").noconvert(), nb::arg("slots").noconvert(), nb::arg("row_start").noconvert(),
      nb::arg("draft_ids").noconvert(), nb::arg("vocab_size"), nb::arg("pool").none() = nb::none(),
      nb::call_guard<nb::gil_scoped_release>(),
      "Drafts the forced output of each row's slot, right for as many tokens as its script\n"
      "says for the round and wrong behind them, into `draft_ids` [num_slots, max_draft].");
}

}  // namespace deltaflash
