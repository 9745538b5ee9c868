#include "plugins/rotary_kv_write/rotary_kv_write.h"

#include <nanobind/stl/array.h>

#include <array>

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"
#include "runtime/bindings/paged_kv.h"
#include "runtime/bindings/slot_table.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

constexpr const char* kOp = "rotary_kv_write";

void rotary_kv_write(const Array<const float, 2>& qkv, const Array<const float, 1>& q_norm,
                     const Array<const float, 1>& k_norm, const Array<const float, 1>& inv_freq,
                     const Array<const std::int32_t, 2>& positions,
                     const std::array<std::int32_t, 3>& section, const Array<float, 3>& q_out,
                     const Array<float, 4>& keys, const Array<float, 4>& values,
                     const Array<const std::int32_t, 2>& page_table, SlotTable table,
                     const Array<const std::int32_t, 1>& slots,
                     const Array<const std::int32_t, 1>& row_start, float eps,
                     float attention_factor, ThreadPool* pool) {
  const auto num_tokens = static_cast<std::int64_t>(qkv.shape(0));
  const auto num_heads = static_cast<std::int64_t>(q_out.shape(1));
  const PagedKv kv = paged_kv(kOp, keys, values, page_table, table.num_slots);
  check_shape(kOp, "q_out", q_out, {num_tokens, num_heads, kv.head_dim});
  check_shape(kOp, "q_norm", q_norm, {kv.head_dim});
  check_shape(kOp, "k_norm", k_norm, {kv.head_dim});
  check_shape(kOp, "positions", positions, {3, num_tokens});
  const std::int64_t width = 2 * (num_heads + kv.num_kv_heads) * kv.head_dim;
  check_argument(static_cast<std::int64_t>(qkv.shape(1)) >= width, kOp,
                 "expected rows of qkv of at least " + std::to_string(width) + " elements, found " +
                     std::to_string(qkv.shape(1)));
  cpu::rotary_kv_write({.qkv = qkv.data(),
                        .qkv_stride = static_cast<std::int64_t>(qkv.shape(1)),
                        .q_norm = q_norm.data(),
                        .k_norm = k_norm.data(),
                        .inv_freq = inv_freq.data(),
                        .positions = positions.data(),
                        .section = {section[0], section[1], section[2]},
                        .q_out = q_out.data(),
                        .kv = kv,
                        .table = table.states(kOp),
                        .rows = row_batch(kOp, slots, row_start, num_tokens, table.num_slots),
                        .num_heads = num_heads,
                        .rotary_dim = 2 * static_cast<std::int64_t>(inv_freq.shape(0)),
                        .attention_factor = attention_factor,
                        .eps = eps,
                        .dtype = DType::kFloat32},
                       stream_of(pool));
}

}  // namespace

void bind_rotary_kv_write(nb::module_& plugins) {
  plugins.def(kOp, &rotary_kv_write, nb::arg("qkv"), nb::arg("q_norm"), nb::arg("k_norm"),
              nb::arg("inv_freq"), nb::arg("positions"), nb::arg("section"), nb::arg("q_out"),
              nb::arg("keys"), nb::arg("values"), nb::arg("page_table"), nb::arg("table"),
              nb::arg("slots"), nb::arg("row_start"), nb::arg("eps"),
              nb::arg("attention_factor") = 1.0f, nb::arg("pool") = nb::none(),
              nb::call_guard<nb::gil_scoped_release>(),
              "Norms and rotates the queries of `qkv` into `q_out` [num_tokens, num_heads,\n"
              "head_dim], the keys, with the values, into pages [num_pages, num_kv_heads,\n"
              "page_size, head_dim]. Row token i goes to kv index kv_len + i of its slot.");
}

}  // namespace deltaflash
