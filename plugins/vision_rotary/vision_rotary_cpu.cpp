#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "plugins/common/simd.h"
#include "plugins/common/thread_pool.h"
#include "plugins/vision_rotary/vision_rotary.h"

namespace deltaflash {
namespace {

using simd::Lanes;

constexpr std::int64_t kMinHeadDim = 16;
constexpr std::int64_t kMaxHeadDim = 128;
constexpr std::int64_t kGroup = 16;         // patches whose keys are turned into columns together
constexpr std::int64_t kGrain = 16 * 1024;  // elements below which a second thread costs more
static_assert(VisionKv::kTile % kGroup == 0);

// Patches [first, end) of the picture, all in one group.
struct Group {
  std::int64_t first;
  std::int64_t end;
  float cosines[kGroup][kMaxHeadDim / 2];  // of the first half of a head's dims
  float sines[kGroup][kMaxHeadDim / 2];
};

Group locate_group(const VisionRotary& args, std::int64_t index) {
  Group group;
  group.first = std::max(args.first_row, index * kGroup);
  group.end = std::min(args.first_row + args.num_rows, (index + 1) * kGroup);
  const std::int64_t quarter = args.kv.head_dim / 4;
  for (std::int64_t patch = group.first; patch < group.end; ++patch) {
    const PatchGrid::Place place = args.grid.place(patch);
    const float* row = args.angles + place.row * 2 * quarter;
    const float* column = args.angles + place.column * 2 * quarter;
    float* cosines = group.cosines[patch % kGroup];
    float* sines = group.sines[patch % kGroup];
    std::copy_n(column, quarter, std::copy_n(row, quarter, cosines));
    std::copy_n(column + quarter, quarter, std::copy_n(row + quarter, quarter, sines));
  }
  return group;
}

// out = (x + bias) turned, for one head of one patch.
DELTAFLASH_INLINE void rotate(const float* x, const float* bias, const float* cosines,
                              const float* sines, std::int64_t half, float* out) {
  std::int64_t n = 0;
  for (; n + simd::kLanes <= half; n += simd::kLanes) {
    const Lanes a = simd::load(x + n) + simd::load(bias + n);
    const Lanes b = simd::load(x + half + n) + simd::load(bias + half + n);
    const Lanes c = simd::load(cosines + n);
    const Lanes s = simd::load(sines + n);
    simd::store(out + n, a * c - b * s);
    simd::store(out + half + n, b * c + a * s);
  }
  for (; n < half; ++n) {
    const float a = x[n] + bias[n];
    const float b = x[half + n] + bias[half + n];
    out[n] = a * cosines[n] - b * sines[n];
    out[half + n] = b * cosines[n] + a * sines[n];
  }
}

DELTAFLASH_SIMD void run_group(const VisionRotary& args, const Group& group) {
  const std::int64_t head_dim = args.kv.head_dim;
  const std::int64_t heads = args.kv.num_heads;
  const std::int64_t width = heads * head_dim;
  const std::int64_t value_stride = args.kv.value_stride();
  const std::int64_t num_tiles = args.kv.num_tiles();
  alignas(64) float turned[kMaxHeadDim * kGroup];
  for (std::int64_t head = 0; head < heads; ++head) {
    for (std::int64_t patch = group.first; patch < group.end; ++patch) {
      const std::int64_t row = patch - args.first_row;
      const std::int64_t slot = patch % kGroup;
      const float* q = args.qkv + row * 3 * width + head * head_dim;
      const float* bias = args.bias + head * head_dim;
      rotate(q, bias, group.cosines[slot], group.sines[slot], head_dim / 2,
             args.q + row * width + head * head_dim);
      rotate(q + width, bias + width, group.cosines[slot], group.sines[slot], head_dim / 2,
             turned + slot * head_dim);
      float* value = args.kv.values + (head * num_tiles * VisionKv::kTile + patch) * value_stride;
      for (std::int64_t d = 0; d < head_dim; ++d) {
        value[d] = q[2 * width + d] + bias[2 * width + d];
      }
      std::fill(value + head_dim, value + value_stride, 0.0f);
    }
    float* keys = args.kv.keys +
                  (head * num_tiles + group.first / VisionKv::kTile) * head_dim * VisionKv::kTile +
                  group.first % VisionKv::kTile;
    const std::int64_t slot = group.first % kGroup;
    for (std::int64_t d = 0; d < head_dim; ++d) {
      for (std::int64_t i = 0; i < group.end - group.first; ++i) {
        keys[d * VisionKv::kTile + i] = turned[(slot + i) * head_dim + d];
      }
    }
  }
}

// Zeros behind the last patch, up to a whole tile.
void fill_padding(const VisionKv& kv) {
  const std::int64_t padded = kv.num_tiles() * VisionKv::kTile;
  for (std::int64_t head = 0; head < kv.num_heads; ++head) {
    float* values = kv.values + head * padded * kv.value_stride();
    std::fill(values + kv.num_patches * kv.value_stride(), values + padded * kv.value_stride(),
              0.0f);
    float* tile = kv.keys + (head * padded + padded - VisionKv::kTile) * kv.head_dim;
    const std::int64_t used = kv.num_patches - (padded - VisionKv::kTile);
    for (std::int64_t d = 0; d < kv.head_dim; ++d) {
      std::fill(tile + d * VisionKv::kTile + used, tile + (d + 1) * VisionKv::kTile, 0.0f);
    }
  }
}

void check(const VisionRotary& args) {
  const VisionKv& kv = args.kv;
  if (kv.head_dim < kMinHeadDim || kv.head_dim > kMaxHeadDim || kv.head_dim % 4 != 0 ||
      kv.num_heads <= 0) {
    throw std::invalid_argument(
        "vision_rotary: expected heads of a dim in 16 .. 128 that is a multiple of 4, got " +
        std::to_string(kv.num_heads) + " of " + std::to_string(kv.head_dim));
  }
  args.grid.check("vision_rotary", args.first_row, args.num_rows);
  if (kv.num_patches != args.grid.num_patches()) {
    throw std::invalid_argument("vision_rotary: expected keys and values of " +
                                std::to_string(args.grid.num_patches()) + " patches, got " +
                                std::to_string(kv.num_patches));
  }
}

}  // namespace

void vision_rotary_angles(std::int64_t num_positions, std::int64_t head_dim, float theta,
                          float* angles) {
  if (num_positions < 0 || head_dim <= 0 || head_dim % 4 != 0 || !(theta > 0.0f)) {
    throw std::invalid_argument(
        "vision_rotary_angles: expected num_positions >= 0, a head_dim that is a multiple of 4 and "
        "theta > 0, got " +
        std::to_string(num_positions) + ", " + std::to_string(head_dim) + " and " +
        std::to_string(theta));
  }
  const std::int64_t quarter = head_dim / 4;
  for (std::int64_t m = 0; m < quarter; ++m) {
    const auto exponent = static_cast<double>(m) / static_cast<double>(quarter);
    const auto frequency = static_cast<float>(1.0 / std::pow(static_cast<double>(theta), exponent));
    for (std::int64_t position = 0; position < num_positions; ++position) {
      const double angle = static_cast<float>(position) * frequency;
      angles[position * 2 * quarter + m] = static_cast<float>(std::cos(angle));
      angles[position * 2 * quarter + quarter + m] = static_cast<float>(std::sin(angle));
    }
  }
}

namespace cpu {

void vision_rotary(const VisionRotary& args, Stream stream) {
  check(args);
  if (args.num_rows == 0) {
    return;
  }
  const std::int64_t first = args.first_row / kGroup;
  const std::int64_t end = (args.first_row + args.num_rows + kGroup - 1) / kGroup;
  const std::int64_t group_elements = kGroup * 3 * args.kv.num_heads * args.kv.head_dim;
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / group_elements);
  parallel_for(stream, end - first, grain, [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t index = from; index < to; ++index) {
      run_group(args, locate_group(args, first + index));
    }
  });
  if (args.first_row + args.num_rows == args.kv.num_patches) {
    fill_padding(args.kv);
  }
}

}  // namespace cpu
}  // namespace deltaflash
