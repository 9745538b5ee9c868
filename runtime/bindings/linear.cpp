#include "plugins/linear/linear.h"

#include <type_traits>

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

template <typename T>
void linear(const Array<const float, 2>& x, const Array<const T, 2>& weight,
            const Array<float, 2>& out, ThreadPool* pool) {
  Linear args{};
  args.num_tokens = static_cast<std::int64_t>(x.shape(0));
  args.in_dim = static_cast<std::int64_t>(x.shape(1));
  args.out_dim = static_cast<std::int64_t>(weight.shape(0));
  check_shape("linear", "weight", weight, {args.out_dim, args.in_dim});
  check_shape("linear", "out", out, {args.num_tokens, args.out_dim});
  args.x = x.data();
  args.weight = weight.data();
  args.out = out.data();
  args.weight_dtype = std::is_same_v<T, float> ? DType::kFloat32 : DType::kBFloat16;
  cpu::linear(args, stream_of(pool));
}

}  // namespace

void bind_linear(nb::module_& plugins) {
  plugins.def("linear", &linear<std::uint16_t>, nb::arg("x"), nb::arg("weight"), nb::arg("out"),
              nb::arg("pool") = nb::none(), nb::call_guard<nb::gil_scoped_release>(),
              R"(Writes x @ weight.T to out, with bits that do not depend on the other rows.

Args:
  x: [num_tokens, in_dim].
  weight: [out_dim, in_dim], the bits of bfloat16 numbers.
  out: [num_tokens, out_dim].
  pool: threads to run on; None is the calling thread.

Raises:
  ValueError: a shape does not fit.)");
  plugins.def("linear", &linear<float>, nb::arg("x"), nb::arg("weight"), nb::arg("out"),
              nb::arg("pool") = nb::none(), nb::call_guard<nb::gil_scoped_release>(),
              "As above, for float32 weights.");
}

}  // namespace deltaflash
