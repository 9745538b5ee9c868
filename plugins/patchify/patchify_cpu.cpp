#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "plugins/common/thread_pool.h"
#include "plugins/patchify/patchify.h"

namespace deltaflash::cpu {
namespace {

constexpr std::int64_t kChannels = 3;
constexpr std::int64_t kGrain = 16;  // patches below which a second thread costs more

void cut_patch(const Patchify& args, std::int64_t row) {
  const std::int64_t size = args.patch_size;
  const std::int64_t area = size * size;
  const std::int64_t line = args.grid.width * size * kChannels;
  const PatchGrid::Place place = args.grid.place(args.first_row + row);
  const std::uint8_t* corner =
      args.pixels + place.row * size * line + place.column * size * kChannels;
  float* out = args.out + row * kChannels * args.num_frames * area;
  for (std::int64_t channel = 0; channel < kChannels; ++channel) {
    const float* levels = args.levels + channel * 256;
    float* frame = out;
    for (std::int64_t y = 0; y < size; ++y) {
      const std::uint8_t* from = corner + y * line + channel;
      for (std::int64_t x = 0; x < size; ++x) {
        *out++ = levels[from[x * kChannels]];
      }
    }
    for (std::int64_t i = 1; i < args.num_frames; ++i) {
      out = std::copy_n(frame, area, out);
    }
  }
}

void check(const Patchify& args) {
  if (args.patch_size <= 0 || args.num_frames <= 0) {
    throw std::invalid_argument("patchify: expected patch_size > 0 and num_frames > 0, got " +
                                std::to_string(args.patch_size) + " and " +
                                std::to_string(args.num_frames));
  }
  args.grid.check("patchify", args.first_row, args.num_rows);
}

}  // namespace

void patchify(const Patchify& args, Stream stream) {
  check(args);
  parallel_for(stream, args.num_rows, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      cut_patch(args, row);
    }
  });
}

}  // namespace deltaflash::cpu
