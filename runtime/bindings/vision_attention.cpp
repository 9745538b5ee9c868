#include "plugins/vision_attention/vision_attention.h"

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"
#include "runtime/bindings/vision_kv.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

constexpr const char* kOp = "vision_attention";

void vision_attention(const Array<const float, 2>& q, const Array<const float, 4>& keys,
                      const Array<const float, 3>& values, std::int64_t num_patches,
                      const Array<float, 2>& out, float scale, ThreadPool* pool) {
  const VisionKv kv = vision_kv(kOp, keys, values, num_patches);
  const auto num_rows = static_cast<std::int64_t>(q.shape(0));
  check_shape(kOp, "q", q, {num_rows, kv.num_heads * kv.head_dim});
  check_shape(kOp, "out", out, {num_rows, kv.num_heads * kv.head_dim});
  cpu::vision_attention(
      {.q = q.data(), .kv = kv, .out = out.data(), .num_rows = num_rows, .scale = scale},
      stream_of(pool));
}

}  // namespace

void bind_vision_attention(nb::module_& plugins) {
  plugins.def(
      kOp, &vision_attention, nb::arg("q"), nb::arg("keys"), nb::arg("values"),
      nb::arg("num_patches"), nb::arg("out"), nb::arg("scale"), nb::arg("pool") = nb::none(),
      nb::call_guard<nb::gil_scoped_release>(),
      "Attention of rows `q` [num_rows, num_heads * head_dim] over all patches of their\n"
      "picture, in both directions, into `out`, which may be q. `keys` and `values` are those\n"
      "that vision_rotary wrote.");
}

}  // namespace deltaflash
