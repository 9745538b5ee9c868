#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "plugins/common/simd.h"
#include "plugins/common/thread_pool.h"
#include "plugins/vision_position_embedding/vision_position_embedding.h"

namespace deltaflash::cpu {
namespace {

using simd::Lanes;

constexpr std::int64_t kGrain = 8 * 1024;  // elements below which a second thread costs more

// Between two rows or columns of the table.
struct Between {
  std::int64_t low;
  std::int64_t high;
  float share;  // of the high one
};

// Position `index` of `count`, stretched over `side` entries with the ends on the ends.
Between locate(std::int64_t index, std::int64_t count, std::int64_t side) {
  if (count == 1) {
    return {.low = 0, .high = 0, .share = 0.0f};
  }
  const std::int64_t scaled = index * (side - 1);
  const std::int64_t low = scaled / (count - 1);
  return {.low = low,
          .high = std::min(low + 1, side - 1),
          .share = static_cast<float>(scaled % (count - 1)) / static_cast<float>(count - 1)};
}

using HalfWords = std::uint16_t __attribute__((vector_size(32)));

DELTAFLASH_INLINE Lanes widen(HalfWords bits) {
  return std::bit_cast<Lanes>(__builtin_convertvector(bits, simd::WordLanes) << 16);
}

DELTAFLASH_INLINE Lanes load_bfloat16(const BFloat16* from) {
  HalfWords bits;
  std::memcpy(&bits, from, sizeof(bits));
  return widen(bits);
}

DELTAFLASH_INLINE Lanes load_bfloat16(const BFloat16* from, std::int64_t count) {
  HalfWords bits = {};
  std::memcpy(&bits, from, static_cast<std::size_t>(count) * sizeof(BFloat16));
  return widen(bits);
}

struct Corners {
  const BFloat16* rows[4];
  float weights[4];
};

DELTAFLASH_SIMD void add_row(float* x, const float* bias, const Corners& corners,
                             std::int64_t dim) {
  const auto& [rows, weights] = corners;
  std::int64_t i = 0;
  for (; i + simd::kLanes <= dim; i += simd::kLanes) {
    Lanes position = load_bfloat16(rows[0] + i) * weights[0];
    for (int c = 1; c < 4; ++c) {
      position += load_bfloat16(rows[c] + i) * weights[c];
    }
    const Lanes embedded =
        bias == nullptr ? simd::load(x + i) : simd::load(x + i) + simd::load(bias + i);
    simd::store(x + i, embedded + position);
  }
  const std::int64_t left = dim - i;
  Lanes position = load_bfloat16(rows[0] + i, left) * weights[0];
  for (int c = 1; c < 4; ++c) {
    position += load_bfloat16(rows[c] + i, left) * weights[c];
  }
  const Lanes embedded = bias == nullptr ? simd::load(x + i, left)
                                         : simd::load(x + i, left) + simd::load(bias + i, left);
  simd::store(x + i, embedded + position, left);
}

}  // namespace

void vision_position_embedding(const VisionPositionEmbedding& args, Stream stream) {
  if (args.side <= 0 || args.dim <= 0) {
    throw std::invalid_argument("vision_position_embedding: expected side > 0 and dim > 0, got " +
                                std::to_string(args.side) + " and " + std::to_string(args.dim));
  }
  args.grid.check("vision_position_embedding", args.first_row, args.num_rows);
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / args.dim);
  parallel_for(stream, args.num_rows, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const PatchGrid::Place place = args.grid.place(args.first_row + row);
      const Between y = locate(place.row, args.grid.height, args.side);
      const Between x = locate(place.column, args.grid.width, args.side);
      const auto entry = [&](std::int64_t table_row, std::int64_t table_column) {
        return args.table + (table_row * args.side + table_column) * args.dim;
      };
      add_row(args.x + row * args.dim, args.bias,
              {.rows = {entry(y.low, x.low), entry(y.low, x.high), entry(y.high, x.low),
                        entry(y.high, x.high)},
               .weights = {(1.0f - y.share) * (1.0f - x.share), (1.0f - y.share) * x.share,
                           y.share * (1.0f - x.share), y.share * x.share}},
              args.dim);
    }
  });
}

}  // namespace deltaflash::cpu
