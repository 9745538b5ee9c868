#include "plugins/layer_norm/layer_norm.h"

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

constexpr const char* kOp = "layer_norm";

void layer_norm(const Array<const float, 2>& x, const Array<const float, 1>& weight,
                const Array<const float, 1>& bias, const Array<float, 2>& out, float eps,
                ThreadPool* pool) {
  const auto num_rows = static_cast<std::int64_t>(x.shape(0));
  const auto dim = static_cast<std::int64_t>(x.shape(1));
  check_shape(kOp, "weight", weight, {dim});
  check_shape(kOp, "bias", bias, {dim});
  check_shape(kOp, "out", out, {num_rows, dim});
  cpu::layer_norm({.x = x.data(),
                   .weight = weight.data(),
                   .bias = bias.data(),
                   .out = out.data(),
                   .num_rows = num_rows,
                   .dim = dim,
                   .eps = eps},
                  stream_of(pool));
}

}  // namespace

void bind_layer_norm(nb::module_& plugins) {
  plugins.def(
      kOp, &layer_norm, nb::arg("x"), nb::arg("weight"), nb::arg("bias"), nb::arg("out"),
      nb::arg("eps"), nb::arg("pool") = nb::none(), nb::call_guard<nb::gil_scoped_release>(),
      "LayerNorm of `x` [num_rows, dim] times `weight` plus `bias` into `out`, which may be\n"
      "x.");
}

}  // namespace deltaflash
