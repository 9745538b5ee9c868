#include "plugins/vision_position_embedding/vision_position_embedding.h"

#include <nanobind/stl/optional.h>

#include <cmath>
#include <optional>

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

constexpr const char* kOp = "vision_position_embedding";

void vision_position_embedding(const Array<float, 2>& x, const Array<const std::uint16_t, 2>& table,
                               std::int64_t grid_height, std::int64_t grid_width,
                               std::int64_t merge_size,
                               const std::optional<Array<const float, 1>>& bias,
                               std::int64_t first_row, ThreadPool* pool) {
  const auto dim = static_cast<std::int64_t>(x.shape(1));
  const auto entries = static_cast<std::int64_t>(table.shape(0));
  const auto side = static_cast<std::int64_t>(std::llround(std::sqrt(entries)));
  check_argument(
      side * side == entries, kOp,
      "expected a table of a square number of entries, found " + std::to_string(entries));
  check_shape(kOp, "table", table, {entries, dim});
  if (bias) {
    check_shape(kOp, "bias", *bias, {dim});
  }
  cpu::vision_position_embedding(
      {.x = x.data(),
       .bias = bias ? bias->data() : nullptr,
       .table = reinterpret_cast<const BFloat16*>(table.data()),
       .grid = {.height = grid_height, .width = grid_width, .merge_size = merge_size},
       .side = side,
       .dim = dim,
       .first_row = first_row,
       .num_rows = static_cast<std::int64_t>(x.shape(0))},
      stream_of(pool));
}

}  // namespace

void bind_vision_position_embedding(nb::module_& plugins) {
  plugins.def(kOp, &vision_position_embedding, nb::arg("x"), nb::arg("table"),
              nb::arg("grid_height"), nb::arg("grid_width"), nb::arg("merge_size"),
              nb::arg("bias") = nb::none(), nb::arg("first_row") = 0, nb::arg("pool") = nb::none(),
              nb::call_guard<nb::gil_scoped_release>(),
              R"(Adds bias and interpolated learned position to patch embeddings, in place.

Args:
  x: [num_rows, dim], patches in merge-block order.
  table: [side * side, dim], the bits of bfloat16 numbers.
  grid_height: rows of patches in the picture.
  grid_width: columns of patches in the picture.
  merge_size: side of a merge block in patches.
  bias: [dim].
  first_row: the patch of x's first row.
  pool: threads to run on; None is the calling thread.

Raises:
  ValueError: a shape does not fit.)");
}

}  // namespace deltaflash
