#include "plugins/gated_rms_norm/gated_rms_norm.h"

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

void gated_rms_norm(const Array<const float, 3>& x, const Array<const float, 2>& z,
                    const Array<const float, 1>& weight, const Array<float, 3>& out, float eps,
                    ThreadPool* pool) {
  GatedRmsNorm args{};
  args.num_tokens = static_cast<std::int64_t>(x.shape(0));
  args.num_heads = static_cast<std::int64_t>(x.shape(1));
  args.head_dim = static_cast<std::int64_t>(x.shape(2));
  check_shape("gated_rms_norm", "z", z, {args.num_tokens, kAnySize});
  check_shape("gated_rms_norm", "weight", weight, {args.head_dim});
  check_shape("gated_rms_norm", "out", out, {args.num_tokens, args.num_heads, args.head_dim});
  args.x = x.data();
  args.z = z.data();
  args.z_stride = static_cast<std::int64_t>(z.shape(1));
  args.weight = weight.data();
  args.out = out.data();
  args.eps = eps;
  args.dtype = DType::kFloat32;
  cpu::gated_rms_norm(args, stream_of(pool));
}

}  // namespace

void bind_gated_rms_norm(nb::module_& plugins) {
  plugins.def("gated_rms_norm", &gated_rms_norm, nb::arg("x"), nb::arg("z"), nb::arg("weight"),
              nb::arg("out"), nb::arg("eps"), nb::arg("pool") = nb::none(),
              nb::call_guard<nb::gil_scoped_release>(),
              R"(Writes x / sqrt(mean(x^2) + eps) * weight * silu(z) to out, per head.

Args:
  x: [num_tokens, num_heads, head_dim].
  z: [num_tokens, z_stride]; a token's gates are its first num_heads * head_dim numbers.
  weight: [head_dim].
  out: as x; may be x.
  eps: added to the mean.
  pool: threads to run on; None is the calling thread.

Raises:
  ValueError: a shape does not fit.)");
}

}  // namespace deltaflash
