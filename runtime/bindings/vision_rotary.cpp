#include "plugins/vision_rotary/vision_rotary.h"

#include <algorithm>

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"
#include "runtime/bindings/vision_kv.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

constexpr const char* kOp = "vision_rotary";

void vision_rotary(const Array<const float, 2>& qkv, const Array<const float, 1>& bias,
                   const Array<const float, 3>& angles, const Array<float, 2>& q,
                   const Array<float, 4>& keys, const Array<float, 3>& values,
                   std::int64_t grid_height, std::int64_t grid_width, std::int64_t merge_size,
                   std::int64_t first_row, ThreadPool* pool) {
  const PatchGrid grid{.height = grid_height, .width = grid_width, .merge_size = merge_size};
  const VisionKv kv = vision_kv(kOp, keys, values, grid.num_patches());
  const auto num_rows = static_cast<std::int64_t>(qkv.shape(0));
  const std::int64_t width = kv.num_heads * kv.head_dim;
  check_shape(kOp, "qkv", qkv, {num_rows, 3 * width});
  check_shape(kOp, "bias", bias, {3 * width});
  check_shape(kOp, "angles", angles, {kAnySize, 2, kv.head_dim / 4});
  check_shape(kOp, "q", q, {num_rows, width});
  check_argument(static_cast<std::int64_t>(angles.shape(0)) >= std::max(grid_height, grid_width),
                 kOp,
                 "expected angles of " + std::to_string(std::max(grid_height, grid_width)) +
                     " positions, found " + std::to_string(angles.shape(0)));
  cpu::vision_rotary({.qkv = qkv.data(),
                      .bias = bias.data(),
                      .angles = angles.data(),
                      .q = q.data(),
                      .kv = kv,
                      .grid = grid,
                      .first_row = first_row,
                      .num_rows = num_rows},
                     stream_of(pool));
}

void angles_of(std::int64_t head_dim, float theta, const Array<float, 3>& angles) {
  check_shape("vision_rotary_angles", "angles", angles, {kAnySize, 2, head_dim / 4});
  vision_rotary_angles(static_cast<std::int64_t>(angles.shape(0)), head_dim, theta, angles.data());
}

}  // namespace

void bind_vision_rotary(nb::module_& plugins) {
  plugins.def("vision_rotary_angles", &angles_of, nb::arg("head_dim"), nb::arg("theta"),
              nb::arg("angles"), nb::call_guard<nb::gil_scoped_release>(),
              "Fills `angles` [num_positions, 2, head_dim / 4] with cosines, then sines.");
  plugins.def(
      kOp, &vision_rotary, nb::arg("qkv"), nb::arg("bias"), nb::arg("angles"), nb::arg("q"),
      nb::arg("keys"), nb::arg("values"), nb::arg("grid_height"), nb::arg("grid_width"),
      nb::arg("merge_size"), nb::arg("first_row") = 0, nb::arg("pool") = nb::none(),
      nb::call_guard<nb::gil_scoped_release>(),
      R"(Adds the bias, rotates q and k by the patch's place, lays k and v out for attention.

Args:
  qkv: [num_rows, 3 * num_heads * head_dim], patches in merge-block order.
  bias: [3 * num_heads * head_dim].
  angles: [num_positions, 2, head_dim / 4] of vision_rotary_angles.
  q: [num_rows, num_heads * head_dim], written.
  keys: [num_heads, num_tiles, head_dim, 64], written at the rows' patches.
  values: [num_heads, num_tiles * 64, head_dim rounded up to 16], written likewise.
  grid_height: rows of patches in the picture.
  grid_width: columns of patches in the picture.
  merge_size: side of a merge block in patches.
  first_row: the patch of the first row of qkv and q.
  pool: threads to run on; None is the calling thread.

Raises:
  ValueError: a shape does not fit.)");
}

}  // namespace deltaflash
