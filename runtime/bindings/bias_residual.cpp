#include "plugins/bias_residual/bias_residual.h"

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

constexpr const char* kOp = "bias_residual";

void bias_residual(const Array<const float, 2>& y, const Array<const float, 1>& bias,
                   const Array<float, 2>& residual, ThreadPool* pool) {
  const auto num_rows = static_cast<std::int64_t>(y.shape(0));
  const auto dim = static_cast<std::int64_t>(y.shape(1));
  check_shape(kOp, "bias", bias, {dim});
  check_shape(kOp, "residual", residual, {num_rows, dim});
  cpu::bias_residual({.y = y.data(),
                      .bias = bias.data(),
                      .residual = residual.data(),
                      .num_rows = num_rows,
                      .dim = dim},
                     stream_of(pool));
}

}  // namespace

void bind_bias_residual(nb::module_& plugins) {
  plugins.def(kOp, &bias_residual, nb::arg("y"), nb::arg("bias"), nb::arg("residual"),
              nb::arg("pool") = nb::none(), nb::call_guard<nb::gil_scoped_release>(),
              "Adds `y` [num_rows, dim] + `bias` [dim] to `residual` in place.");
}

}  // namespace deltaflash
