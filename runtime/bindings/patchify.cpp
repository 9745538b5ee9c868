#include "plugins/patchify/patchify.h"

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

constexpr const char* kOp = "patchify";

void patchify(const Array<const std::uint8_t, 3>& pixels, const Array<const float, 2>& levels,
              const Array<float, 2>& out, std::int64_t patch_size, std::int64_t merge_size,
              std::int64_t num_frames, std::int64_t first_row, ThreadPool* pool) {
  const auto height = static_cast<std::int64_t>(pixels.shape(0));
  const auto width = static_cast<std::int64_t>(pixels.shape(1));
  check_argument(patch_size > 0 && height % patch_size == 0 && width % patch_size == 0, kOp,
                 "expected pixels in whole patches of side " + std::to_string(patch_size) +
                     ", found " + std::to_string(height) + " x " + std::to_string(width));
  check_shape(kOp, "pixels", pixels, {height, width, 3});
  check_shape(kOp, "levels", levels, {3, 256});
  check_shape(kOp, "out", out, {kAnySize, 3 * num_frames * patch_size * patch_size});
  cpu::patchify({.pixels = pixels.data(),
                 .levels = levels.data(),
                 .out = out.data(),
                 .grid = {.height = height / patch_size,
                          .width = width / patch_size,
                          .merge_size = merge_size},
                 .patch_size = patch_size,
                 .num_frames = num_frames,
                 .first_row = first_row,
                 .num_rows = static_cast<std::int64_t>(out.shape(0))},
                stream_of(pool));
}

}  // namespace

void bind_patchify(nb::module_& plugins) {
  plugins.def(kOp, &patchify, nb::arg("pixels"), nb::arg("levels"), nb::arg("out"),
              nb::arg("patch_size"), nb::arg("merge_size"), nb::arg("num_frames"),
              nb::arg("first_row") = 0, nb::arg("pool") = nb::none(),
              nb::call_guard<nb::gil_scoped_release>(),
              R"(Cuts a picture into normalised patches in merge-block order.

Args:
  pixels: [height, width, 3], RGB.
  levels: [3, 256]: what a channel's value becomes.
  out: [num_rows, 3 * num_frames * patch_size * patch_size], channel first; each frame is the same.
  patch_size: side of a patch in pixels.
  merge_size: side of a merge block in patches.
  num_frames: how often a channel's patch is written.
  first_row: the patch of out's first row.
  pool: threads to run on; None is the calling thread.

Raises:
  ValueError: a shape does not fit.)");
}

}  // namespace deltaflash
