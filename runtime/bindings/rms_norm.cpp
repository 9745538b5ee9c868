#include "plugins/rms_norm/rms_norm.h"

#include <nanobind/stl/optional.h>

#include <optional>

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

void rms_norm(const Array<const float, 2>& x, const Array<const float, 1>& weight,
              const Array<float, 2>& out, float eps, bool unit_offset,
              const std::optional<Array<float, 2>>& residual, ThreadPool* pool) {
  const auto num_tokens = static_cast<std::int64_t>(x.shape(0));
  const auto dim = static_cast<std::int64_t>(x.shape(1));
  check_shape("rms_norm", "weight", weight, {dim});
  check_shape("rms_norm", "out", out, {num_tokens, dim});
  if (residual) {
    check_shape("rms_norm", "residual", *residual, {num_tokens, dim});
  }
  cpu::rms_norm({.x = x.data(),
                 .residual = residual ? residual->data() : nullptr,
                 .weight = weight.data(),
                 .out = out.data(),
                 .num_tokens = num_tokens,
                 .dim = dim,
                 .eps = eps,
                 .unit_offset = unit_offset,
                 .dtype = DType::kFloat32},
                stream_of(pool));
}

}  // namespace

void bind_rms_norm(nb::module_& plugins) {
  plugins.def(
      "rms_norm", &rms_norm, nb::arg("x"), nb::arg("weight"), nb::arg("out"), nb::arg("eps"),
      nb::arg("unit_offset"), nb::arg("residual") = nb::none(), nb::arg("pool") = nb::none(),
      nb::call_guard<nb::gil_scoped_release>(),
      "RMSNorm of `x` [num_tokens, dim] into `out`. With `residual`, x is first added to it\n"
      "in place and the sum is normalised. `unit_offset`: multiplies by 1 + weight.");
}

}  // namespace deltaflash
