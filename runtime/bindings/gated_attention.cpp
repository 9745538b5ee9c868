#include "plugins/gated_attention/gated_attention.h"

#include <string>

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"
#include "runtime/bindings/paged_kv.h"
#include "runtime/bindings/slot_table.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

constexpr const char* kOp = "gated_attention";

// The gate is a view into the fused projection: any strides but the last.
void gated_attention(const Array<const float, 3>& q, const StridedArray<const float, 3>& gate,
                     const Array<float, 3>& out, const Array<const float, 4>& keys,
                     const Array<const float, 4>& values,
                     const Array<const std::int32_t, 2>& page_table, SlotTable table,
                     const Array<const std::int32_t, 1>& slots,
                     const Array<const std::int32_t, 1>& row_start, float scale, ThreadPool* pool) {
  const auto num_tokens = static_cast<std::int64_t>(q.shape(0));
  const auto num_heads = static_cast<std::int64_t>(q.shape(1));
  const PagedKv kv = paged_kv(kOp, keys, values, page_table, table.num_slots);
  check_shape(kOp, "q", q, {num_tokens, num_heads, kv.head_dim});
  check_shape(kOp, "out", out, {num_tokens, num_heads, kv.head_dim});
  check_argument(
      gate.shape(0) == q.shape(0) && gate.shape(1) == q.shape(1) && gate.shape(2) == q.shape(2),
      kOp,
      "expected gate of the shape of q, found [" + std::to_string(gate.shape(0)) + ", " +
          std::to_string(gate.shape(1)) + ", " + std::to_string(gate.shape(2)) + "]");
  check_argument(gate.stride(2) == 1, kOp,
                 "expected gate with a contiguous last axis, found a stride of " +
                     std::to_string(gate.stride(2)) + " elements");
  cpu::gated_attention({.q = q.data(),
                        .gate = gate.data(),
                        .gate_stride = gate.stride(0),
                        .gate_head_stride = gate.stride(1),
                        .out = out.data(),
                        .kv = kv,
                        .table = table.states(kOp),
                        .rows = row_batch(kOp, slots, row_start, num_tokens, table.num_slots),
                        .num_heads = num_heads,
                        .scale = scale,
                        .dtype = DType::kFloat32},
                       stream_of(pool));
}

}  // namespace

void bind_gated_attention(nb::module_& plugins) {
  plugins.def(kOp, &gated_attention, nb::arg("q"), nb::arg("gate"), nb::arg("out"), nb::arg("keys"),
              nb::arg("values"), nb::arg("page_table"), nb::arg("table"), nb::arg("slots"),
              nb::arg("row_start"), nb::arg("scale"), nb::arg("pool") = nb::none(),
              nb::call_guard<nb::gil_scoped_release>(),
              "Causal attention of `q` [num_tokens, num_heads, head_dim] over pages [num_pages,\n"
              "num_kv_heads, page_size, head_dim], times sigmoid(gate). Row token i sees the kv\n"
              "indices 0 .. kv_len + i of its slot.");
}

}  // namespace deltaflash
