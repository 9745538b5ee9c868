#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "plugins/common/simd.h"
#include "plugins/common/thread_pool.h"
#include "plugins/rotary_kv_write/rotary_kv_write.h"

namespace deltaflash::cpu {
namespace {

using simd::Lanes;

// RMSNorm of one head, then the rotation of its first `rotary_dim` dims in place.
DELTAFLASH_SIMD void norm_rotate_head(const float* x, const float* weight, const float* cos,
                                      const float* sin, float* out, std::int64_t head_dim,
                                      std::int64_t rotary_dim, float eps) {
  Lanes squares{};
  std::int64_t i = 0;
  for (; i + 16 <= head_dim; i += 16) {
    const Lanes v = simd::load(x + i);
    squares += v * v;
  }
  const std::int64_t rest = head_dim - i;
  const Lanes tail = simd::load(x + i, rest);
  squares += tail * tail;
  const float inv_rms = 1.0f / std::sqrt(simd::sum(squares) / static_cast<float>(head_dim) + eps);
  for (std::int64_t j = 0; j < i; j += 16) {
    simd::store(out + j, simd::load(x + j) * inv_rms * (simd::load(weight + j) + 1.0f));
  }
  simd::store(out + i, tail * inv_rms * (simd::load(weight + i, rest) + 1.0f), rest);

  float* low = out;
  float* high = out + rotary_dim / 2;
  for (std::int64_t j = 0; j < rotary_dim / 2; ++j) {
    const float a = low[j];
    const float b = high[j];
    low[j] = a * cos[j] - b * sin[j];
    high[j] = b * cos[j] + a * sin[j];
  }
}

int axis_of(std::int64_t frequency, const std::int32_t (&section)[3]) {
  if (frequency % 3 == 1 && frequency < std::int64_t{3} * section[1]) {
    return 1;
  }
  if (frequency % 3 == 2 && frequency < std::int64_t{3} * section[2]) {
    return 2;
  }
  return 0;
}

void check(const RotaryKvWrite& args) {
  if (args.dtype != DType::kFloat32 || args.kv.dtype != DType::kFloat32) {
    throw std::invalid_argument("rotary_kv_write: expected dtype float32, got " +
                                std::string(name_of(args.dtype)) + " with a cache of " +
                                std::string(name_of(args.kv.dtype)));
  }
  if (args.rotary_dim < 0 || args.rotary_dim % 2 != 0 || args.rotary_dim > args.kv.head_dim) {
    throw std::invalid_argument("rotary_kv_write: expected an even rotary_dim in [0, " +
                                std::to_string(args.kv.head_dim) + "], got " +
                                std::to_string(args.rotary_dim));
  }
  const std::int64_t frequencies =
      std::int64_t{args.section[0]} + args.section[1] + args.section[2];
  if (frequencies != args.rotary_dim / 2) {
    throw std::invalid_argument("rotary_kv_write: expected sections that sum to " +
                                std::to_string(args.rotary_dim / 2) + ", got " +
                                std::to_string(frequencies));
  }
}

}  // namespace

void rotary_kv_write(const RotaryKvWrite& args, Stream stream) {
  check(args);
  const PagedKv& kv = args.kv;
  const RowBatch& rows = args.rows;
  const std::int64_t head_dim = kv.head_dim;
  const std::int64_t frequencies = args.rotary_dim / 2;
  const auto head_bytes = static_cast<std::size_t>(head_dim) * sizeof(float);
  auto* keys = static_cast<float*>(kv.keys);
  auto* values = static_cast<float*>(kv.values);
  if (rows.num_rows == 0) {
    return;
  }

  parallel_for(stream, rows.row_start[rows.num_rows], 4, [&](std::int64_t begin, std::int64_t end) {
    thread_local std::vector<float> angles;
    angles.resize(static_cast<std::size_t>(2 * frequencies));
    float* cos = angles.data();
    float* sin = cos + frequencies;
    std::int64_t row = std::upper_bound(rows.row_start, rows.row_start + rows.num_rows + 1, begin) -
                       rows.row_start - 1;
    for (std::int64_t token = begin; token < end; ++token) {
      while (token >= rows.row_start[row + 1]) {
        ++row;
      }
      const std::int64_t slot = rows.slots[row];
      if (slot < 0) {
        continue;
      }
      for (std::int64_t j = 0; j < frequencies; ++j) {
        const std::int32_t position =
            args.positions[axis_of(j, args.section) * rows.num_tokens + token];
        const float angle = static_cast<float>(position) * args.inv_freq[j];
        cos[j] = std::cos(angle) * args.attention_factor;
        sin[j] = std::sin(angle) * args.attention_factor;
      }
      const float* q = static_cast<const float*>(args.qkv) + token * args.qkv_stride;
      const float* k = q + 2 * args.num_heads * head_dim;
      const float* v = k + kv.num_kv_heads * head_dim;
      float* q_out = static_cast<float*>(args.q_out) + token * args.num_heads * head_dim;
      for (std::int64_t head = 0; head < args.num_heads; ++head) {
        norm_rotate_head(q + 2 * head * head_dim, args.q_norm, cos, sin, q_out + head * head_dim,
                         head_dim, args.rotary_dim, args.eps);
      }

      const std::int64_t index = args.table[slot].kv_len + (token - rows.row_start[row]);
      if (index < 0 || index / kv.page_size >= kv.max_pages) {
        continue;
      }
      const std::int64_t page = kv.page_table[slot * kv.max_pages + index / kv.page_size];
      if (page < 0) {
        continue;
      }
      for (std::int64_t head = 0; head < kv.num_kv_heads; ++head) {
        const std::int64_t to =
            ((page * kv.num_kv_heads + head) * kv.page_size + index % kv.page_size) * head_dim;
        norm_rotate_head(k + head * head_dim, args.k_norm, cos, sin, keys + to, head_dim,
                         args.rotary_dim, args.eps);
        std::memcpy(values + to, v + head * head_dim, head_bytes);
      }
    }
  });
}

}  // namespace deltaflash::cpu
