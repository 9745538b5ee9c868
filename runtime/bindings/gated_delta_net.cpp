#include "plugins/gated_delta_net/gated_delta_net.h"

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"
#include "runtime/bindings/slot_table.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

/// The recurrent memory of one layer.
struct Memory {
  const Array<float, 4>& state;
  const Array<float, 4>& ring_d;
  const Array<float, 4>& ring_k;
  const Array<float, 3>& ring_g;
};

GatedDeltaNet with_memory(const char* op, const Memory& memory, const SlotTable& table,
                          std::int64_t history_limit) {
  GatedDeltaNet args{};
  args.num_value_heads = static_cast<std::int64_t>(memory.state.shape(1));
  args.value_dim = static_cast<std::int64_t>(memory.state.shape(2));
  args.key_dim = static_cast<std::int64_t>(memory.state.shape(3));
  args.num_key_heads = static_cast<std::int64_t>(memory.ring_k.shape(1));
  args.ring_rows = static_cast<std::int64_t>(memory.ring_g.shape(2));
  args.history_limit = history_limit;
  check_shape(op, "state", memory.state,
              {table.num_slots, args.num_value_heads, args.value_dim, args.key_dim});
  check_shape(op, "ring_d", memory.ring_d,
              {table.num_slots, args.num_value_heads, args.ring_rows, args.value_dim});
  check_shape(op, "ring_k", memory.ring_k,
              {table.num_slots, args.num_key_heads, args.ring_rows, args.key_dim});
  check_shape(op, "ring_g", memory.ring_g, {table.num_slots, args.num_value_heads, args.ring_rows});
  args.state = memory.state.data();
  args.ring_d = memory.ring_d.data();
  args.ring_k = memory.ring_k.data();
  args.ring_g = memory.ring_g.data();
  args.table = table.states(op);
  args.dtype = DType::kFloat32;
  args.ring_dtype = DType::kFloat32;
  return args;
}

/// The two row ops differ in nothing but the function and its name.
template <void (*kLaunch)(const GatedDeltaNet&, Stream)>
auto row_op(const char* op) {
  return
      [op](const Array<const float, 2>& qkv, const Array<const float, 2>& ba,
           const Array<const float, 1>& a_log, const Array<const float, 1>& dt_bias,
           const Array<float, 4>& state, const Array<float, 4>& ring_d,
           const Array<float, 4>& ring_k, const Array<float, 3>& ring_g, const Array<float, 3>& out,
           const SlotTable& table, const Array<const std::int32_t, 1>& slots,
           const Array<const std::int32_t, 1>& row_start, std::int64_t history_limit,
           ThreadPool* pool) {
        GatedDeltaNet args = with_memory(op, {state, ring_d, ring_k, ring_g}, table, history_limit);
        const std::int64_t num_tokens = static_cast<std::int64_t>(qkv.shape(0));
        check_shape(op, "ba", ba, {num_tokens, kAnySize});
        check_shape(op, "a_log", a_log, {args.num_value_heads});
        check_shape(op, "dt_bias", dt_bias, {args.num_value_heads});
        check_shape(op, "out", out, {num_tokens, args.num_value_heads, args.value_dim});
        args.qkv = qkv.data();
        args.qkv_stride = static_cast<std::int64_t>(qkv.shape(1));
        args.ba = ba.data();
        args.ba_stride = static_cast<std::int64_t>(ba.shape(1));
        args.a_log = a_log.data();
        args.dt_bias = dt_bias.data();
        args.out = out.data();
        args.rows = row_batch(op, slots, row_start, num_tokens, table.num_slots);
        kLaunch(args, stream_of(pool));
      };
}

void materialize(const Array<float, 4>& state, const Array<float, 4>& ring_d,
                 const Array<float, 4>& ring_k, const Array<float, 3>& ring_g,
                 const SlotTable& table, std::int64_t slot, std::int64_t num_records,
                 const Array<float, 3>& out) {
  const char* op = "gated_delta_net_materialize";
  const GatedDeltaNet args = with_memory(op, {state, ring_d, ring_k, ring_g}, table, 0);
  check_shape(op, "out", out, {args.num_value_heads, args.value_dim, args.key_dim});
  check_argument(slot >= 0 && slot < table.num_slots, op,
                 "expected slot in [0, " + std::to_string(table.num_slots) + "), found " +
                     std::to_string(slot));
  cpu::gated_delta_net_materialize(args, slot, num_records, out.data());
}

template <void (*kLaunch)(const GatedDeltaNet&, Stream)>
void def_row_op(nb::module_& plugins, const char* op, const char* doc) {
  plugins.def(op, row_op<kLaunch>(op), nb::arg("qkv"), nb::arg("ba"), nb::arg("a_log"),
              nb::arg("dt_bias"), nb::arg("state"), nb::arg("ring_d"), nb::arg("ring_k"),
              nb::arg("ring_g"), nb::arg("out"), nb::arg("table"), nb::arg("slots"),
              nb::arg("row_start"), nb::arg("history_limit") = 0, nb::arg("pool") = nb::none(),
              nb::call_guard<nb::gil_scoped_release>(), doc);
}

}  // namespace

void bind_gated_delta_net(nb::module_& plugins) {
  def_row_op<&cpu::gated_delta_net_prefill>(
      plugins, "gated_delta_net_prefill",
      R"(Runs the recurrence over each row in chunks of 64 tokens, into `out` and the state.

Args:
  qkv: [num_tokens, qkv_stride]; a token begins with its queries, keys and values.
  ba: [num_tokens, ba_stride]; a token begins with b and a, [num_value_heads] each.
  a_log: [num_value_heads].
  dt_bias: [num_value_heads].
  state: [num_slots, num_value_heads, value_dim, key_dim].
  ring_d: [num_slots, num_value_heads, ring_rows, value_dim].
  ring_k: [num_slots, num_key_heads, ring_rows, key_dim].
  ring_g: [num_slots, num_value_heads, ring_rows].
  out: [num_tokens, num_value_heads, value_dim].
  table: [num_slots], of slot_table_dtype().
  slots: [num_rows]; -1 is a padded row.
  row_start: [num_rows + 1].
  history_limit: unused here.
  pool: threads to run on; None is the calling thread.

Raises:
  ValueError: a shape, a slot or a row start does not fit.)");
  def_row_op<&cpu::gated_delta_net_verify>(
      plugins, "gated_delta_net_verify",
      R"(Runs each row as a window behind its slot's state and ring, appends the row's records.

Args are those of gated_delta_net_prefill, with
  history_limit: records that a row may leave live; 0 folds the history at every row's start.

Raises:
  ValueError: a shape, a slot or a row start does not fit.)");
  plugins.def("gated_delta_net_materialize", &materialize, nb::arg("state"), nb::arg("ring_d"),
              nb::arg("ring_k"), nb::arg("ring_g"), nb::arg("table"), nb::arg("slot"),
              nb::arg("num_records"), nb::arg("out"), nb::call_guard<nb::gil_scoped_release>(),
              R"(Writes the state of `slot` after its first `num_records` live records to `out`.

Args are those of gated_delta_net_prefill, with
  out: [num_value_heads, value_dim, key_dim].

Raises:
  ValueError: a shape, a slot or a row start does not fit.)");
  plugins.def("flushes", &flushes, nb::arg("ring_history"), nb::arg("row_len"),
              nb::arg("history_limit"),
              "Whether a row of row_len tokens folds its slot's history before it runs.");
}

}  // namespace deltaflash
