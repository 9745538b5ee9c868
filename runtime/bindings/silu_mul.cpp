#include "plugins/silu_mul/silu_mul.h"

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

void silu_mul(const Array<const float, 2>& gate_up, const Array<float, 2>& out, ThreadPool* pool) {
  const auto num_tokens = static_cast<std::int64_t>(out.shape(0));
  const auto dim = static_cast<std::int64_t>(out.shape(1));
  check_shape("silu_mul", "gate_up", gate_up, {num_tokens, 2 * dim});
  cpu::silu_mul({.gate_up = gate_up.data(),
                 .out = out.data(),
                 .num_tokens = num_tokens,
                 .dim = dim,
                 .dtype = DType::kFloat32},
                stream_of(pool));
}

}  // namespace

void bind_silu_mul(nb::module_& plugins) {
  plugins.def("silu_mul", &silu_mul, nb::arg("gate_up"), nb::arg("out"),
              nb::arg("pool") = nb::none(), nb::call_guard<nb::gil_scoped_release>(),
              "silu(gate) * up of `gate_up` [num_tokens, 2 * dim] into `out` [num_tokens, dim].");
}

}  // namespace deltaflash
