#include "plugins/causal_conv/causal_conv.h"

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"
#include "runtime/bindings/slot_table.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

void causal_conv(const Array<const float, 2>& x, const Array<const float, 2>& weight,
                 const Array<float, 3>& ring, const Array<float, 2>& out, const SlotTable& table,
                 const Array<const std::int32_t, 1>& slots,
                 const Array<const std::int32_t, 1>& row_start, ThreadPool* pool) {
  const char* op = "causal_conv";
  const std::int64_t num_tokens = static_cast<std::int64_t>(x.shape(0));
  CausalConv args{};
  args.channels = static_cast<std::int64_t>(weight.shape(0));
  args.kernel = static_cast<std::int64_t>(weight.shape(1));
  args.ring_cols = static_cast<std::int64_t>(ring.shape(1));
  check_shape(op, "ring", ring, {table.num_slots, kAnySize, args.channels});
  check_shape(op, "out", out, {num_tokens, args.channels});
  args.x = x.data();
  args.x_stride = static_cast<std::int64_t>(x.shape(1));
  args.weight = weight.data();
  args.ring = ring.data();
  args.out = out.data();
  args.table = table.states(op);
  args.rows = row_batch(op, slots, row_start, num_tokens, table.num_slots);
  args.dtype = DType::kFloat32;
  cpu::causal_conv(args, stream_of(pool));
}

}  // namespace

void bind_causal_conv(nb::module_& plugins) {
  plugins.def("causal_conv", &causal_conv, nb::arg("x"), nb::arg("weight"), nb::arg("ring"),
              nb::arg("out"), nb::arg("table"), nb::arg("slots"), nb::arg("row_start"),
              nb::arg("pool") = nb::none(), nb::call_guard<nb::gil_scoped_release>(),
              R"(Convolves each row causally behind what its slot's ring holds, applies SiLU.

Args:
  x: [num_tokens, x_stride]; a token's inputs are its first `channels` numbers.
  weight: [channels, kernel].
  ring: [num_slots, ring_cols, channels], raw inputs, read and written.
  out: [num_tokens, channels].
  table: [num_slots], of slot_table_dtype().
  slots: [num_rows]; -1 is a padded row.
  row_start: [num_rows + 1].
  pool: threads to run on; None is the calling thread.

Raises:
  ValueError: a shape, a slot or a row start does not fit.)");
}

}  // namespace deltaflash
