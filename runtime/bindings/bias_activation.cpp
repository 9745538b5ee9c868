#include "plugins/bias_activation/bias_activation.h"

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

constexpr const char* kOp = "bias_activation";

void bias_activation(const Array<const float, 2>& x, const Array<const float, 1>& bias,
                     const Array<float, 2>& out, Activation activation, ThreadPool* pool) {
  const auto num_rows = static_cast<std::int64_t>(x.shape(0));
  const auto dim = static_cast<std::int64_t>(x.shape(1));
  check_shape(kOp, "bias", bias, {dim});
  check_shape(kOp, "out", out, {num_rows, dim});
  cpu::bias_activation({.x = x.data(),
                        .bias = bias.data(),
                        .out = out.data(),
                        .num_rows = num_rows,
                        .dim = dim,
                        .activation = activation},
                       stream_of(pool));
}

}  // namespace

void bind_bias_activation(nb::module_& plugins) {
  nb::enum_<Activation>(plugins, "Activation", "What bias_activation applies.")
      .value("NONE", Activation::kNone)
      .value("GELU_TANH", Activation::kGeluTanh)
      .value("GELU_ERF", Activation::kGeluErf);
  plugins.def(kOp, &bias_activation, nb::arg("x"), nb::arg("bias"), nb::arg("out"),
              nb::arg("activation"), nb::arg("pool") = nb::none(),
              nb::call_guard<nb::gil_scoped_release>(),
              "activation(`x` [num_rows, dim] + `bias` [dim]) into `out`, which may be x.");
}

}  // namespace deltaflash
