#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "plugins/common/simd.h"
#include "plugins/common/thread_pool.h"
#include "plugins/gated_attention/gated_attention.h"

namespace deltaflash::cpu {
namespace {

using simd::kLanesOf;

constexpr int kTile = 64;        // keys of a tile; tile n starts at kv index n * kTile
constexpr int kGroup = 16;       // keys of a tile that are addressed as one base pointer
constexpr int kMaxQueries = 32;  // queries of a work item, unless one token alone has more
// What is left of a head_dim, a multiple of 8, behind whole vectors: nothing unless these are
// wider.
template <typename L>
constexpr std::int64_t kTail = kLanesOf<L> > 8 ? 8 : 0;
constexpr float kMasked = -std::numeric_limits<float>::infinity();

template <typename L>
DELTAFLASH_INLINE L sigmoid(L x) {
  return 1.0f / (1.0f + simd::exp(-x));
}

// Consecutive tokens of one row: with a kv head, the work of one thread.
struct TokenBlock {
  std::int64_t slot;
  std::int64_t token;  // the first, in the packed batch
  std::int64_t num_tokens;
  std::int64_t position;  // kv index of the first
};

// One thread's buffer, kept between launches so that a decode step allocates nothing.
class Buffer {
 public:
  float* reserve(std::int64_t count) {
    if (buffer_.size() < static_cast<std::size_t>(count) / 16 + 1) {
      buffer_.resize(static_cast<std::size_t>(count) / 16 + 1);
    }
    return buffer_.data()->floats;
  }

 private:
  struct alignas(64) Line {
    float floats[16];
  };
  std::vector<Line> buffer_;
};

// The keys or values of one tile: row j at base[j / kGroup] + (j % kGroup) * head_dim.
struct Tile {
  const float* keys[kTile / kGroup];
  const float* values[kTile / kGroup];
  std::uint64_t missing;  // bit j: no page is held for key j
};

// The queries of a token block: token-major, then the query heads of the kv head. Rows are
// `stride` floats apart and zero behind head_dim.
struct Queries {
  std::int64_t stride;
  float* q;       // [num_queries, stride]
  float* acc;     // [num_queries, stride]: sum of exp(score - max) * value
  float* scores;  // [num_queries, kTile]
  float* max;     // [num_queries]
  float* sum;     // [num_queries]: sum of exp(score - max)
  float* factor;  // [num_queries]: what the new maximum multiplies the old sums by
};

// Scores of kQueries queries against the first `count` keys, rounded up to 16. Each is a sum over
// lanes d modulo their number and then sum_each, however many queries share the loads.
template <typename L, int kQueries>
DELTAFLASH_INLINE void score_keys(const Queries& block, std::int64_t query, const Tile& tile,
                                  int count, std::int64_t head_dim, float scale) {
  constexpr int kLanes = kLanesOf<L>;
  constexpr int kKeys = kLanes / kQueries;
  const float* q = block.q + query * block.stride;
  const std::int64_t whole = head_dim / kLanes * kLanes;
  for (int j = 0; j < count; j += kKeys) {
    const float* key = tile.keys[j / kGroup] + (j % kGroup) * head_dim;
    L sums[kLanes] = {};
    for (std::int64_t d = 0; d < whole; d += kLanes) {
#pragma GCC unroll 16
      for (int b = 0; b < kKeys; ++b) {
        const L k = simd::load<L>(key + b * head_dim + d);
#pragma GCC unroll 16
        for (int a = 0; a < kQueries; ++a) {
          sums[a * kKeys + b] += simd::load<L>(q + a * block.stride + d) * k;
        }
      }
    }
    if (kLanes > 8 && whole < head_dim) {
#pragma GCC unroll 16
      for (int b = 0; b < kKeys; ++b) {
        const L k = simd::load<L>(key + b * head_dim + whole, kTail<L>);
#pragma GCC unroll 16
        for (int a = 0; a < kQueries; ++a) {
          sums[a * kKeys + b] += simd::load<L>(q + a * block.stride + whole) * k;
        }
      }
    }
    const L scores = simd::sum_each(sums) * scale;
    float lanes[kLanes];
    simd::store(lanes, scores);
#pragma GCC unroll 16
    for (std::int64_t a = 0; a < kQueries; ++a) {
      std::memcpy(block.scores + (query + a) * kTile + j, lanes + a * kKeys, kKeys * sizeof(float));
    }
  }
}

// Turns the scores of one query into weights exp(score - max) and moves its running max and sum.
template <typename L>
DELTAFLASH_INLINE void softmax_tile(const Queries& block, std::int64_t query, int count,
                                    std::uint64_t missing) {
  float* scores = block.scores + query * kTile;
  for (int j = count; j < kTile; ++j) {
    scores[j] = kMasked;
  }
  if (missing != 0) {
    for (int j = 0; j < count; ++j) {
      scores[j] = (missing >> j & 1) != 0 ? kMasked : scores[j];
    }
  }
  constexpr int kVectors = kTile / kLanesOf<L>;
  L s[kVectors];
  L top = simd::load<L>(scores);
#pragma GCC unroll 16
  for (std::int64_t i = 0; i < kVectors; ++i) {
    s[i] = simd::load<L>(scores + i * kLanesOf<L>);
    top = top > s[i] ? top : s[i];
  }
  float highest = block.max[query];
  for (int lane = 0; lane < kLanesOf<L>; ++lane) {
    highest = top[lane] > highest ? top[lane] : highest;
  }
  // Nothing to see yet: any finite maximum makes all weights zero.
  const float shift = highest == kMasked ? 0.0f : highest;
  const L factor = simd::exp(simd::broadcast<L>(block.max[query] - shift));
  L sum{};
#pragma GCC unroll 16
  for (std::int64_t i = 0; i < kVectors; ++i) {
    s[i] = simd::exp(s[i] - shift);
    simd::store(scores + i * kLanesOf<L>, s[i]);
    sum += s[i];
  }
  block.max[query] = highest;
  block.sum[query] = block.sum[query] * factor[0] + simd::sum(sum);
  block.factor[query] = factor[0];
}

// acc = acc * factor + weights * values, key after key, for kQueries queries.
template <typename L, int kQueries, int kVectors>
DELTAFLASH_INLINE void add_values(const Queries& block, std::int64_t query, const Tile& tile,
                                  int count, std::int64_t head_dim, std::int64_t d) {
  float* acc = block.acc + query * block.stride + d;
  const float* weights = block.scores + query * kTile;
  L sums[kQueries][kVectors];
#pragma GCC unroll 4
  for (int a = 0; a < kQueries; ++a) {
#pragma GCC unroll 4
    for (std::int64_t v = 0; v < kVectors; ++v) {
      sums[a][v] =
          simd::load<L>(acc + a * block.stride + v * kLanesOf<L>) * block.factor[query + a];
    }
  }
  for (int first = 0; first < count; first += kGroup) {
    const float* value = tile.values[first / kGroup] + d;
    const int last = std::min(first + kGroup, count);
    for (int j = first; j < last; ++j, value += head_dim) {
#pragma GCC unroll 4
      for (std::int64_t v = 0; v < kVectors; ++v) {
        const L x = simd::load<L>(value + v * kLanesOf<L>);
#pragma GCC unroll 4
        for (int a = 0; a < kQueries; ++a) {
          sums[a][v] += weights[a * kTile + j] * x;
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int a = 0; a < kQueries; ++a) {
#pragma GCC unroll 4
    for (std::int64_t v = 0; v < kVectors; ++v) {
      simd::store(acc + a * block.stride + v * kLanesOf<L>, sums[a][v]);
    }
  }
}

// The last 8 dims of a head_dim that is no multiple of 16.
template <typename L, int kQueries>
DELTAFLASH_INLINE void add_values_tail(const Queries& block, std::int64_t query, const Tile& tile,
                                       int count, std::int64_t head_dim, std::int64_t d) {
#pragma GCC unroll 4
  for (int a = 0; a < kQueries; ++a) {
    float* acc = block.acc + (query + a) * block.stride + d;
    L sum = simd::load<L>(acc) * block.factor[query + a];
    for (int j = 0; j < count; ++j) {
      sum += block.scores[(query + a) * kTile + j] *
             simd::load<L>(tile.values[j / kGroup] + (j % kGroup) * head_dim + d, kTail<L>);
    }
    simd::store(acc, sum);
  }
}

template <typename L, int kQueries>
DELTAFLASH_INLINE void add_tile(const Queries& block, std::int64_t query, const Tile& tile,
                                int count, std::int64_t head_dim) {
  // Accumulators that fit into 16 registers, or into 32.
  constexpr int kVectors = sizeof(L) == 64 ? 4 : 2;
  constexpr std::int64_t kSpan = kVectors * kLanesOf<L>;
  std::int64_t d = 0;
  for (; d + kSpan <= head_dim; d += kSpan) {
    add_values<L, kQueries, kVectors>(block, query, tile, count, head_dim, d);
  }
  for (; d + kLanesOf<L> <= head_dim; d += kLanesOf<L>) {
    add_values<L, kQueries, 1>(block, query, tile, count, head_dim, d);
  }
  if (kLanesOf<L> > 8 && d < head_dim) {
    add_values_tail<L, kQueries>(block, query, tile, count, head_dim, d);
  }
}

template <typename L>
DELTAFLASH_INLINE void attend_lanes(const Queries& block, std::int64_t query, std::int64_t end,
                                    const Tile& tile, int count, std::int64_t head_dim,
                                    float scale) {
  std::int64_t i = query;
  for (; i + 4 <= end; i += 4) {
    score_keys<L, 4>(block, i, tile, count, head_dim, scale);
  }
  for (; i + 2 <= end; i += 2) {
    score_keys<L, 2>(block, i, tile, count, head_dim, scale);
  }
  for (; i < end; ++i) {
    score_keys<L, 1>(block, i, tile, count, head_dim, scale);
  }
  for (i = query; i < end; ++i) {
    softmax_tile<L>(block, i, count, tile.missing);
  }
  i = query;
  for (; i + 4 <= end; i += 4) {
    add_tile<L, 4>(block, i, tile, count, head_dim);
  }
  for (; i + 2 <= end; i += 2) {
    add_tile<L, 2>(block, i, tile, count, head_dim);
  }
  for (; i < end; ++i) {
    add_tile<L, 1>(block, i, tile, count, head_dim);
  }
}

// One tile for the queries [query, end), all of which see exactly its first `count` keys.
void attend(const Queries& block, std::int64_t query, std::int64_t end, const Tile& tile, int count,
            std::int64_t head_dim, float scale) {
  simd::for_machine([&](auto tag) DELTAFLASH_INLINE_LAMBDA {
    attend_lanes<typename decltype(tag)::type>(block, query, end, tile, count, head_dim, scale);
  });
}

template <typename L>
DELTAFLASH_INLINE void gate_head_lanes(const float* acc, float sum, const float* gate, float* out,
                                       std::int64_t head_dim) {
  const float inv_sum = sum == 0.0f ? 0.0f : 1.0f / sum;
  std::int64_t d = 0;
  for (; d + kLanesOf<L> <= head_dim; d += kLanesOf<L>) {
    simd::store(out + d, simd::load<L>(acc + d) * inv_sum * sigmoid(simd::load<L>(gate + d)));
  }
  if (kLanesOf<L> > 8 && d < head_dim) {
    simd::store(out + d,
                simd::load<L>(acc + d) * inv_sum * sigmoid(simd::load<L>(gate + d, kTail<L>)),
                kTail<L>);
  }
}

// out = acc / sum * sigmoid(gate); zeros for a query that saw no key.
void gate_head(const float* acc, float sum, const float* gate, float* out, std::int64_t head_dim) {
  simd::for_machine([&](auto tag) DELTAFLASH_INLINE_LAMBDA {
    gate_head_lanes<typename decltype(tag)::type>(acc, sum, gate, out, head_dim);
  });
}

// Finds the rows of the tile at kv index `first`. Groups that lie in one page are used in place;
// the others are gathered into `copies`, [2, kTile, head_dim], with zeros where no page is held.
Tile locate_tile(const PagedKv& kv, std::int64_t slot, std::int64_t kv_head, std::int64_t first,
                 int count, float* copies) {
  const auto* keys = static_cast<const float*>(kv.keys);
  const auto* values = static_cast<const float*>(kv.values);
  const std::int64_t head_dim = kv.head_dim;
  const auto offset_of = [&](std::int64_t index) -> std::int64_t {
    const std::int64_t page_index = index / kv.page_size;
    const std::int64_t page =
        page_index < kv.max_pages ? kv.page_table[slot * kv.max_pages + page_index] : -1;
    return page < 0 ? -1
                    : ((page * kv.num_kv_heads + kv_head) * kv.page_size + index % kv.page_size) *
                          head_dim;
  };
  Tile tile{};
  for (std::int64_t group = 0; group * kGroup < count; ++group) {
    const std::int64_t start = first + group * kGroup;
    if (kv.page_size % kGroup == 0) {
      const std::int64_t offset = offset_of(start);
      if (offset >= 0) {
        tile.keys[group] = keys + offset;
        tile.values[group] = values + offset;
        continue;
      }
    }
    float* key_copy = copies + group * kGroup * head_dim;
    float* value_copy = key_copy + kTile * head_dim;
    for (int j = 0; j < kGroup; ++j) {
      const bool in_use = group * kGroup + j < count;
      const std::int64_t offset = in_use ? offset_of(start + j) : -1;
      if (offset >= 0) {
        std::copy_n(keys + offset, head_dim, key_copy + j * head_dim);
        std::copy_n(values + offset, head_dim, value_copy + j * head_dim);
      } else {
        std::fill_n(key_copy + j * head_dim, head_dim, 0.0f);
        std::fill_n(value_copy + j * head_dim, head_dim, 0.0f);
        tile.missing |= in_use ? std::uint64_t{1} << (group * kGroup + j) : 0;
      }
    }
    tile.keys[group] = key_copy;
    tile.values[group] = value_copy;
  }
  return tile;
}

void run_block(const GatedAttention& args, const TokenBlock& tokens, std::int64_t kv_head) {
  const PagedKv& kv = args.kv;
  const std::int64_t head_dim = kv.head_dim;
  const std::int64_t ratio = args.num_heads / kv.num_kv_heads;
  const std::int64_t num_queries = tokens.num_tokens * ratio;
  const std::int64_t stride = (head_dim + 15) / 16 * 16;

  thread_local Buffer buffer;
  float* next =
      buffer.reserve(num_queries * (2 * stride + kTile + 3) + 2 * std::int64_t{kTile} * head_dim);
  const auto take = [&next](std::int64_t count) {
    float* taken = next;
    next += count;
    return taken;
  };
  Queries block{};
  block.stride = stride;
  block.q = take(num_queries * stride);
  block.acc = take(num_queries * stride);
  block.scores = take(num_queries * kTile);
  float* copies = take(2 * std::int64_t{kTile} * head_dim);
  block.max = take(num_queries);
  block.sum = take(num_queries);
  block.factor = take(num_queries);
  std::fill_n(block.q, 2 * num_queries * stride, 0.0f);
  std::fill_n(block.max, num_queries, kMasked);
  std::fill_n(block.sum, num_queries, 0.0f);

  const auto head_of = [&](std::int64_t query) {
    return (tokens.token + query / ratio) * args.num_heads + kv_head * ratio + query % ratio;
  };
  for (std::int64_t query = 0; query < num_queries; ++query) {
    std::copy_n(static_cast<const float*>(args.q) + head_of(query) * head_dim, head_dim,
                block.q + query * stride);
  }

  const std::int64_t visible_to_last = tokens.position + tokens.num_tokens;
  for (std::int64_t first = 0; first < visible_to_last; first += kTile) {
    const int count = static_cast<int>(std::min<std::int64_t>(kTile, visible_to_last - first));
    const Tile tile = locate_tile(kv, tokens.slot, kv_head, first, count, copies);
    if (tokens.position + 1 >= first + count) {
      attend(block, 0, num_queries, tile, count, head_dim, args.scale);
      continue;
    }
    // The tile reaches past the first token: each token for itself, so that nothing of a later
    // token, not even a NaN, enters an earlier one.
    for (std::int64_t token = 0; token < tokens.num_tokens; ++token) {
      const std::int64_t visible =
          std::min<std::int64_t>(count, tokens.position + token + 1 - first);
      if (visible > 0) {
        attend(block, token * ratio, (token + 1) * ratio, tile, static_cast<int>(visible), head_dim,
               args.scale);
      }
    }
  }

  for (std::int64_t query = 0; query < num_queries; ++query) {
    const std::int64_t token = tokens.token + query / ratio;
    const std::int64_t head = kv_head * ratio + query % ratio;
    gate_head(block.acc + query * stride, block.sum[query],
              static_cast<const float*>(args.gate) + token * args.gate_stride +
                  head * args.gate_head_stride,
              static_cast<float*>(args.out) + head_of(query) * head_dim, head_dim);
  }
}

void check(const GatedAttention& args) {
  if (args.dtype != DType::kFloat32 || args.kv.dtype != DType::kFloat32) {
    throw std::invalid_argument("gated_attention: expected dtype float32, got " +
                                std::string(name_of(args.dtype)) + " with a cache of " +
                                std::string(name_of(args.kv.dtype)));
  }
  if (args.kv.head_dim <= 0 || args.kv.head_dim % 8 != 0) {
    throw std::invalid_argument("gated_attention: expected head_dim to be a multiple of 8, got " +
                                std::to_string(args.kv.head_dim));
  }
  if (args.kv.num_kv_heads <= 0 || args.num_heads <= 0 ||
      args.num_heads % args.kv.num_kv_heads != 0) {
    throw std::invalid_argument("gated_attention: expected num_heads to be a multiple of " +
                                std::to_string(args.kv.num_kv_heads) + " kv heads, got " +
                                std::to_string(args.num_heads));
  }
  if (args.kv.page_size <= 0) {
    throw std::invalid_argument("gated_attention: expected page_size > 0, got " +
                                std::to_string(args.kv.page_size));
  }
}

}  // namespace

void gated_attention(const GatedAttention& args, Stream stream) {
  check(args);
  const RowBatch& rows = args.rows;
  const std::int64_t row_elements = args.num_heads * args.kv.head_dim;
  const std::int64_t ratio = args.num_heads / args.kv.num_kv_heads;
  const std::int64_t block_tokens = std::max<std::int64_t>(1, kMaxQueries / ratio);

  std::vector<TokenBlock> blocks;
  for (std::int64_t row = 0; row < rows.num_rows; ++row) {
    const std::int64_t slot = rows.slots[row];
    const std::int64_t first = rows.row_start[row];
    const std::int64_t row_len = rows.row_start[row + 1] - first;
    if (slot < 0) {
      std::fill_n(static_cast<float*>(args.out) + first * row_elements, row_len * row_elements,
                  0.0f);
      continue;
    }
    for (std::int64_t i = 0; i < row_len; i += block_tokens) {
      blocks.push_back(
          {slot, first + i, std::min(block_tokens, row_len - i), args.table[slot].kv_len + i});
    }
  }
  const std::int64_t kv_heads = args.kv.num_kv_heads;
  parallel_for(stream, static_cast<std::int64_t>(blocks.size()) * kv_heads, 1,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t item = begin; item < end; ++item) {
                   run_block(args, blocks[static_cast<std::size_t>(item / kv_heads)],
                             item % kv_heads);
                 }
               });
}

}  // namespace deltaflash::cpu
