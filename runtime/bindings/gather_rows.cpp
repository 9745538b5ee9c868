#include "plugins/gather_rows/gather_rows.h"

#include <string>

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

template <typename T, DType kDType>
void gather_rows(const Array<const T, 2>& x, const Array<const std::int32_t, 1>& index,
                 const Array<T, 2>& out, ThreadPool* pool) {
  const auto num_out = static_cast<std::int64_t>(index.shape(0));
  const auto num_tokens = static_cast<std::int64_t>(x.shape(0));
  const auto dim = static_cast<std::int64_t>(x.shape(1));
  check_shape("gather_rows", "out", out, {num_out, dim});
  for (std::int64_t i = 0; i < num_out; ++i) {
    const std::int32_t row = index.data()[i];
    check_argument(
        row >= 0 && row < num_tokens, "gather_rows",
        "expected index in [0, " + std::to_string(num_tokens) + "), found " + std::to_string(row));
  }
  cpu::gather_rows({.x = x.data(),
                    .index = index.data(),
                    .out = out.data(),
                    .num_out = num_out,
                    .dim = dim,
                    .dtype = kDType},
                   stream_of(pool));
}

}  // namespace

void bind_gather_rows(nb::module_& plugins) {
  plugins.def("gather_rows", &gather_rows<float, DType::kFloat32>, nb::arg("x"), nb::arg("index"),
              nb::arg("out"), nb::arg("pool") = nb::none(),
              nb::call_guard<nb::gil_scoped_release>(),
              "x[index] of `x` [num_tokens, dim] into `out` [num_out, dim].");
  plugins.def("gather_rows", &gather_rows<std::uint16_t, DType::kBFloat16>, nb::arg("x"),
              nb::arg("index"), nb::arg("out"), nb::arg("pool") = nb::none(),
              nb::call_guard<nb::gil_scoped_release>(), "The same for bfloat16 bits.");
}

}  // namespace deltaflash
