#include "runtime/src/image.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>

#include "runtime/bindings/bindings.h"
#include "runtime/src/prompt_layout.h"
#include "runtime/src/types.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace deltaflash {
namespace {

using Pixels =
    nb::ndarray<const std::uint8_t, nb::numpy, nb::shape<-1, -1, 3>, nb::c_contig, nb::device::cpu>;
using PositionArray = nb::ndarray<nb::numpy, std::int32_t, nb::shape<3, -1>, nb::c_contig>;

/// [3, num_tokens], and the offset of the tokens behind the prompt.
std::pair<PositionArray, std::int32_t> positions_of(const std::vector<TokenId>& token_ids,
                                                    const std::vector<Image>& images,
                                                    TokenId image_token_id,
                                                    std::int64_t image_factor) {
  VisionConfig config{};
  config.image_token_id = image_token_id;
  config.patch_size = image_factor;
  config.merge_size = 1;
  PromptLayout layout = lay_out_prompt(token_ids, images, config);
  auto* values = new std::vector<std::int32_t>(std::move(layout.positions));
  const nb::capsule owner(
      values, [](void* data) noexcept { delete static_cast<std::vector<std::int32_t>*>(data); });
  return {PositionArray(values->data(), {3, token_ids.size()}, owner), layout.rope_delta};
}

}  // namespace

void bind_image(nb::module_& module) {
  nb::class_<Image>(module, "Image", "A resized picture.")
      .def(
          "__init__",
          [](Image* self, const Pixels& pixels, const nb::bytes& digest) {
            const auto* begin = pixels.data();
            new (self) Image{
                .height = static_cast<std::int64_t>(pixels.shape(0)),
                .width = static_cast<std::int64_t>(pixels.shape(1)),
                .pixels = std::make_shared<std::vector<std::uint8_t>>(begin, begin + pixels.size()),
                .digest = std::string(digest.c_str(), digest.size())};
          },
          "pixels"_a, "digest"_a = nb::bytes("", 0),
          nb::sig("def __init__(self, pixels: numpy.typing.NDArray[numpy.uint8], digest: bytes = "
                  "b'') -> None"),
          "pixels: [height, width, 3], RGB, C-contiguous, copied; height and width are multiples\n"
          "of EngineInfo.image_factor. digest: of the pixels; with one, ExecutorConfig.\n"
          "encoder_cache_bytes may keep what the encoder makes of them.")
      .def_ro("height", &Image::height)
      .def_ro("width", &Image::width)
      .def_prop_ro("digest", [](const Image& self) {
        return nb::bytes(self.digest.data(), self.digest.size());
      });

  nb::enum_<ProgressPhase>(module, "ProgressPhase", "Where a request is.")
      .value("QUEUED", ProgressPhase::kQueued)
      .value("ENCODING", ProgressPhase::kEncoding)
      .value("PREFILL", ProgressPhase::kPrefill)
      .value("DECODING", ProgressPhase::kDecoding);

  nb::class_<Progress>(module, "Progress", "Where a request is, and how far.")
      .def_ro("phase", &Progress::phase)
      .def_ro("fraction", &Progress::fraction,
              "Of the phase, 0 to 1; None for phases that have no measure.");

  module.def("prompt_positions", &positions_of, "input_token_ids"_a, "images"_a, "image_token_id"_a,
             "image_factor"_a,
             nb::sig("def prompt_positions(input_token_ids: collections.abc.Sequence[int], images: "
                     "collections.abc.Sequence[Image], image_token_id: int, image_factor: int) -> "
                     "tuple[numpy.typing.NDArray[numpy.int32], int]"),
             "Rotary positions [3, num_tokens] of a prompt, and what is added to the index of a\n"
             "token behind it; for tests.\n\n"
             "Raises:\n"
             "    ValueError: the runs of placeholders do not fit the pictures.");
}

}  // namespace deltaflash
