#include "plugins/round_metadata/round_metadata.h"

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"
#include "runtime/bindings/slot_table.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

constexpr const char* kOp = "round_metadata";

void round_metadata(SlotTable table, const Array<const std::int32_t, 2>& draft_ids,
                    const Array<const std::int32_t, 1>& slots,
                    const Array<const std::int32_t, 1>& row_start,
                    const Array<std::int32_t, 1>& token_ids,
                    const Array<std::int32_t, 2>& positions, ThreadPool* pool) {
  const auto num_tokens = static_cast<std::int64_t>(token_ids.shape(0));
  check_shape(kOp, "draft_ids", draft_ids, {table.num_slots, kAnySize});
  check_shape(kOp, "positions", positions, {3, num_tokens});
  cpu::round_metadata({.table = table.states(kOp),
                       .draft_ids = draft_ids.data(),
                       .max_draft = static_cast<std::int64_t>(draft_ids.shape(1)),
                       .rows = row_batch(kOp, slots, row_start, num_tokens, table.num_slots),
                       .token_ids = token_ids.data(),
                       .positions = positions.data()},
                      stream_of(pool));
}

}  // namespace

void bind_round_metadata(nb::module_& plugins) {
  plugins.def(kOp, &round_metadata, nb::arg("table"), nb::arg("draft_ids").noconvert(),
              nb::arg("slots").noconvert(), nb::arg("row_start").noconvert(),
              nb::arg("token_ids").noconvert(), nb::arg("positions").noconvert(),
              nb::arg("pool").none() = nb::none(), nb::call_guard<nb::gil_scoped_release>(),
              "Token ids [num_tokens] and rotary positions [3, num_tokens] of a verify step.");
}

}  // namespace deltaflash
