#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "plugins/common/simd.h"
#include "plugins/common/thread_pool.h"
#include "plugins/gated_delta_net/gated_delta_net.h"

// Both forms treat a window of tokens alike (replay window in verify, chunk in prefill): with the
// state S in front of the window and G the running sum of log alpha within it,
//   A[i, j] = beta_i exp(G_i - G_j) (k_i . k_j)  for j < i
//   (I + A) D = R,  R_i = beta_i (v_i - exp(G_i) S k_i)
//   o_i = exp(G_i) S q_i + sum_{j <= i} exp(G_i - G_j) (q_i . k_j) D_j
//   S <- exp(G_last) S + sum_j exp(G_last - G_j) D_j k_j^T
// Sums of log alpha are kept in double: a difference of two must not lose what a small gate adds
// behind a large one. Head dims are padded to whole vectors with zeros in all scratch memory.

namespace deltaflash::cpu {
namespace {

using simd::kLanesOf;

constexpr std::int64_t kChunk = 64;
constexpr float kNormEps = 1e-6f;
constexpr std::int64_t kStateRows = 16;   // state rows that are folded, then read while in L1
constexpr std::int64_t kGrain = 1 << 16;  // multiply-adds below which a further thread does not pay

struct Row {
  std::int64_t slot;
  std::int64_t begin;  // its first token in the packed buffers
  std::int64_t length;
  std::int64_t kv_len;
  std::int64_t ring_base;
  std::int64_t ring_history;
};

Row row_at(const GatedDeltaNet& args, std::int64_t index) {
  const std::int64_t slot = args.rows.slots[index];
  const std::int64_t begin = args.rows.row_start[index];
  const std::int64_t length = args.rows.row_start[index + 1] - begin;
  if (slot < 0) {
    return {slot, begin, length, 0, 0, 0};
  }
  const SlotState& state = args.table[slot];
  return {slot, begin, length, state.kv_len, state.ring_base, state.ring_history};
}

std::int64_t longest_row(const RowBatch& rows) {
  std::int64_t longest = 0;
  for (std::int64_t row = 0; row < rows.num_rows; ++row) {
    longest = std::max<std::int64_t>(longest, rows.row_start[row + 1] - rows.row_start[row]);
  }
  return longest;
}

/// Where the operands of one value head lie.
struct Head {
  Head(const GatedDeltaNet& args, std::int64_t slot, std::int64_t value_head)
      : value_head(value_head),
        key_head(value_head / (args.num_value_heads / args.num_key_heads)),
        first_of_group(value_head % (args.num_value_heads / args.num_key_heads) == 0) {
    const std::int64_t value_index = slot * args.num_value_heads + value_head;
    const std::int64_t key_index = slot * args.num_key_heads + key_head;
    state = args.state + value_index * args.value_dim * args.key_dim;
    ring_d = static_cast<float*>(args.ring_d) + value_index * args.ring_rows * args.value_dim;
    ring_k = static_cast<float*>(args.ring_k) + key_index * args.ring_rows * args.key_dim;
    ring_g = args.ring_g + value_index * args.ring_rows;
  }

  std::int64_t value_head;
  std::int64_t key_head;
  bool first_of_group;  // the value head that writes the keys its group shares
  float* state;
  float* ring_d;
  float* ring_k;
  float* ring_g;
};

/// A window's operands in scratch memory, for up to `capacity` tokens.
struct Window {
  Window(std::int64_t capacity, std::int64_t padded_key, std::int64_t padded_value,
         simd::Scratch& scratch)
      : capacity(capacity),
        score_stride(simd::round_up(capacity)),
        kq(scratch.take(2 * capacity * padded_key)),
        s_kq(scratch.take(2 * capacity * padded_value)),
        d(scratch.take(capacity * padded_value)),
        scores(scratch.take(2 * capacity * score_stride)),
        decay(scratch.take(score_stride)),
        g(scratch.take(capacity)),
        beta(scratch.take(capacity)),
        decay_from_start(scratch.take(capacity)),
        sum_g(static_cast<std::size_t>(capacity)) {}

  static std::int64_t scratch_size(std::int64_t capacity, std::int64_t padded_key,
                                   std::int64_t padded_value) {
    const std::int64_t padded = simd::round_up(capacity);
    return 2 * capacity * padded_key + 3 * capacity * padded_value + 2 * capacity * padded +
           4 * padded;
  }

  std::int64_t capacity;
  std::int64_t score_stride;
  float* kq;                // [2 * length, padded_key]: normalised keys, then queries
  float* s_kq;              // [2 * length, padded_value]: S k_i, then S q_i
  float* d;                 // [length, padded_value]: v on entry, then D
  float* scores;            // [2 * length, score_stride]: k_i . k_j, then q_i . k_j; then decayed
  float* decay;             // [score_stride]
  float* g;                 // [length], log alpha
  float* beta;              // [length]
  float* decay_from_start;  // [length], exp(G_i)
  std::vector<double> sum_g;
  std::int64_t length = 0;
};

/// Ring records in scratch memory.
struct History {
  History(std::int64_t capacity, std::int64_t padded_key, std::int64_t padded_value,
          simd::Scratch& scratch)
      : k(scratch.take(capacity * padded_key)),
        weighted_d(scratch.take(capacity * padded_value)),
        weight(scratch.take(capacity)),
        sum_g(static_cast<std::size_t>(capacity)) {}

  static std::int64_t scratch_size(std::int64_t capacity, std::int64_t padded_key,
                                   std::int64_t padded_value) {
    return capacity * (padded_key + padded_value) + simd::round_up(capacity);
  }

  float* k;           // [length, padded_key]
  float* weighted_d;  // [length, padded_value]: d_m exp(G_last - G_m)
  float* weight;      // [length]
  std::vector<double> sum_g;
  std::int64_t length = 0;
  float decay = 1.0f;  // exp(G_last)
};

void copy_padded(const float* from, std::int64_t count, float* to) {
  std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
  std::fill(to + count, to + simd::round_up(count), 0.0f);
}

template <typename L>
DELTAFLASH_INLINE void normalise_lanes(const float* from, std::int64_t count, float scale,
                                       float* to) {
  copy_padded(from, count, to);
  L squares = {};
  for (std::int64_t i = 0; i < count; i += kLanesOf<L>) {
    const L at = simd::load<L>(to + i);
    squares += at * at;
  }
  const float factor = scale / std::sqrt(simd::sum(squares) + kNormEps);
  for (std::int64_t i = 0; i < count; i += kLanesOf<L>) {
    simd::store(to + i, simd::load<L>(to + i) * factor);
  }
}

/// to[i] = from[i] * scale / sqrt(sum(from^2) + eps), padded with zeros.
void normalise(const float* from, std::int64_t count, float scale, float* to) {
  simd::for_machine([&](auto tag) DELTAFLASH_INLINE_LAMBDA {
    normalise_lanes<typename decltype(tag)::type>(from, count, scale, to);
  });
}

template <typename L>
DELTAFLASH_INLINE void decay_since_lanes(const double* sums, std::int64_t count, double last,
                                         float* to) {
  for (std::int64_t j = 0; j < count; ++j) {
    to[j] = static_cast<float>(last - sums[j]);
  }
  std::fill(to + count, to + simd::round_up(count), 0.0f);
  for (std::int64_t j = 0; j < count; j += kLanesOf<L>) {
    simd::store(to + j, simd::exp(simd::load<L>(to + j)));
  }
}

/// to[j] = exp(last - sums[j]), j < count; rounds up to whole vectors. The caller passes only
/// sums that stand before `last`, so no exponent is positive.
void decay_since(const double* sums, std::int64_t count, double last, float* to) {
  simd::for_machine([&](auto tag) DELTAFLASH_INLINE_LAMBDA {
    decay_since_lanes<typename decltype(tag)::type>(sums, count, last, to);
  });
}

template <typename L>
DELTAFLASH_INLINE void dot_all_lanes(const float* rows, std::int64_t row_stride,
                                     std::int64_t num_rows, const float* x, std::int64_t x_stride,
                                     std::int64_t num_x, std::int64_t count, float* out,
                                     std::int64_t out_stride) {
  simd::dot_matrix<L>(rows, row_stride, num_rows, x, x_stride, num_x, count, out, out_stride);
}

void dot_all(const float* rows, std::int64_t row_stride, std::int64_t num_rows, const float* x,
             std::int64_t x_stride, std::int64_t num_x, std::int64_t count, float* out,
             std::int64_t out_stride) {
  simd::for_machine([&](auto tag) DELTAFLASH_INLINE_LAMBDA {
    dot_all_lanes<typename decltype(tag)::type>(rows, row_stride, num_rows, x, x_stride, num_x,
                                                count, out, out_stride);
  });
}

/// sums[b] += sum_m coefficients[m * coefficient_stride] * rows[m, b-th vector], in order of m.
template <typename L, int kBlocks>
DELTAFLASH_INLINE void accumulate(L (&sums)[kBlocks], const float* coefficients,
                                  std::int64_t coefficient_stride, const float* rows,
                                  std::int64_t row_stride, std::int64_t num_rows) {
  for (std::int64_t m = 0; m < num_rows; ++m) {
    const float coefficient = coefficients[m * coefficient_stride];
    for (int b = 0; b < kBlocks; ++b) {
      sums[b] += coefficient * simd::load<L>(rows + m * row_stride + b * kLanesOf<L>);
    }
  }
}

/// base = factor * base + sum_m coefficients[m] * rows[m], `width` (whole vectors) wide.
template <typename L, int kBlocks>
DELTAFLASH_INLINE std::int64_t scale_add_blocks(float* base, float factor,
                                                const float* coefficients,
                                                std::int64_t coefficient_stride, const float* rows,
                                                std::int64_t row_stride, std::int64_t num_rows,
                                                std::int64_t at, std::int64_t width) {
  for (; at + kBlocks * kLanesOf<L> <= width; at += kBlocks * kLanesOf<L>) {
    L sums[kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
      sums[b] = simd::load<L>(base + at + b * kLanesOf<L>) * factor;
    }
    accumulate(sums, coefficients, coefficient_stride, rows + at, row_stride, num_rows);
    for (int b = 0; b < kBlocks; ++b) {
      simd::store(base + at + b * kLanesOf<L>, sums[b]);
    }
  }
  return at;
}

template <typename L>
DELTAFLASH_INLINE void scale_add(float* base, float factor, const float* coefficients,
                                 std::int64_t coefficient_stride, const float* rows,
                                 std::int64_t row_stride, std::int64_t num_rows,
                                 std::int64_t width) {
  std::int64_t at = scale_add_blocks<L, 8>(base, factor, coefficients, coefficient_stride, rows,
                                           row_stride, num_rows, 0, width);
  at = scale_add_blocks<L, 2>(base, factor, coefficients, coefficient_stride, rows, row_stride,
                              num_rows, at, width);
  scale_add_blocks<L, 1>(base, factor, coefficients, coefficient_stride, rows, row_stride, num_rows,
                         at, width);
}

template <typename L>
DELTAFLASH_INLINE void fold_lanes(float* state, std::int64_t num_rows, std::int64_t padded_key,
                                  float decay, const float* weighted_d, std::int64_t d_stride,
                                  const float* k, std::int64_t num_records) {
  for (std::int64_t v = 0; v < num_rows; ++v) {
    scale_add<L>(state + v * padded_key, decay, weighted_d + v, d_stride, k, padded_key,
                 num_records, padded_key);
  }
}

/// state[v] = decay * state[v] + sum_m weighted_d[m, v] * k[m] for num_rows state rows.
void fold(float* state, std::int64_t num_rows, std::int64_t padded_key, float decay,
          const float* weighted_d, std::int64_t d_stride, const float* k,
          std::int64_t num_records) {
  simd::for_machine([&](auto tag) DELTAFLASH_INLINE_LAMBDA {
    fold_lanes<typename decltype(tag)::type>(state, num_rows, padded_key, decay, weighted_d,
                                             d_stride, k, num_records);
  });
}

template <typename L>
DELTAFLASH_INLINE void add_history_lanes(float* rows, std::int64_t num_rows,
                                         std::int64_t padded_value, float decay,
                                         const float* scores, std::int64_t score_stride,
                                         const float* weighted_d, std::int64_t num_records) {
  for (std::int64_t i = 0; i < num_rows; ++i) {
    scale_add<L>(rows + i * padded_value, decay, scores + i * score_stride, 1, weighted_d,
                 padded_value, num_records, padded_value);
  }
}

/// rows[i] = decay * rows[i] + sum_m scores[i, m] * weighted_d[m].
void add_history(float* rows, std::int64_t num_rows, std::int64_t padded_value, float decay,
                 const float* scores, std::int64_t score_stride, const float* weighted_d,
                 std::int64_t num_records) {
  simd::for_machine([&](auto tag) DELTAFLASH_INLINE_LAMBDA {
    add_history_lanes<typename decltype(tag)::type>(rows, num_rows, padded_value, decay, scores,
                                                    score_stride, weighted_d, num_records);
  });
}

template <typename L>
DELTAFLASH_INLINE void scale_rows_lanes(float* rows, std::int64_t num_rows, std::int64_t width,
                                        const float* weight) {
  for (std::int64_t m = 0; m < num_rows; ++m) {
    for (std::int64_t i = 0; i < width; i += kLanesOf<L>) {
      simd::store(rows + m * width + i, simd::load<L>(rows + m * width + i) * weight[m]);
    }
  }
}

/// Multiplies each row m of `rows` by weight[m].
void scale_rows(float* rows, std::int64_t num_rows, std::int64_t width, const float* weight) {
  simd::for_machine([&](auto tag) DELTAFLASH_INLINE_LAMBDA {
    scale_rows_lanes<typename decltype(tag)::type>(rows, num_rows, width, weight);
  });
}

void load_window(const GatedDeltaNet& args, const Head& head, std::int64_t first_token,
                 std::int64_t length, Window& window) {
  const std::int64_t padded_key = simd::round_up(args.key_dim);
  const std::int64_t padded_value = simd::round_up(args.value_dim);
  const std::int64_t key_width = args.num_key_heads * args.key_dim;
  const float query_scale = 1.0f / std::sqrt(static_cast<float>(args.key_dim));
  const float neg_rate = -std::exp(args.a_log[head.value_head]);
  window.length = length;
  // The products with the state leave the pad alone; it is never stored, but read by whole vectors.
  for (std::int64_t i = 0; i < 2 * length; ++i) {
    std::fill(window.s_kq + i * padded_value + args.value_dim, window.s_kq + (i + 1) * padded_value,
              0.0f);
  }
  double sum_g = 0.0;
  for (std::int64_t i = 0; i < length; ++i) {
    const float* qkv = static_cast<const float*>(args.qkv) + (first_token + i) * args.qkv_stride;
    normalise(qkv + key_width + head.key_head * args.key_dim, args.key_dim, 1.0f,
              window.kq + i * padded_key);
    normalise(qkv + head.key_head * args.key_dim, args.key_dim, query_scale,
              window.kq + (length + i) * padded_key);
    copy_padded(qkv + 2 * key_width + head.value_head * args.value_dim, args.value_dim,
                window.d + i * padded_value);
    const float* ba = static_cast<const float*>(args.ba) + (first_token + i) * args.ba_stride;
    const float a = ba[args.num_value_heads + head.value_head] + args.dt_bias[head.value_head];
    const float softplus = a > 20.0f ? a : std::log1p(std::exp(a));
    window.beta[i] = 1.0f / (1.0f + std::exp(-ba[head.value_head]));
    window.g[i] = neg_rate * softplus;
    sum_g += static_cast<double>(window.g[i]);
    window.sum_g[static_cast<std::size_t>(i)] = sum_g;
    window.decay_from_start[i] = static_cast<float>(std::exp(sum_g));
  }
}

void load_history(const GatedDeltaNet& args, const Head& head, std::int64_t base,
                  std::int64_t length, History& history) {
  const std::int64_t padded_key = simd::round_up(args.key_dim);
  const std::int64_t padded_value = simd::round_up(args.value_dim);
  history.length = length;
  history.decay = 1.0f;
  double sum_g = 0.0;
  for (std::int64_t m = 0; m < length; ++m) {
    const std::int64_t at = (base + m) & (args.ring_rows - 1);
    copy_padded(head.ring_k + at * args.key_dim, args.key_dim, history.k + m * padded_key);
    copy_padded(head.ring_d + at * args.value_dim, args.value_dim,
                history.weighted_d + m * padded_value);
    sum_g += static_cast<double>(head.ring_g[at]);
    history.sum_g[static_cast<std::size_t>(m)] = sum_g;
  }
  if (length > 0) {
    history.decay = static_cast<float>(std::exp(sum_g));
    decay_since(history.sum_g.data(), length, sum_g, history.weight);
    scale_rows(history.weighted_d, length, padded_value, history.weight);
  }
}

/// The rows of D and of the output, kBlocks vectors of the value dim at a time.
template <typename L, int kBlocks>
DELTAFLASH_INLINE std::int64_t solve_blocks(Window& window, std::int64_t padded_value,
                                            std::int64_t at) {
  for (; at + kBlocks * kLanesOf<L> <= padded_value; at += kBlocks * kLanesOf<L>) {
    for (std::int64_t i = 0; i < window.length; ++i) {
      float* d = window.d + i * padded_value + at;
      float* s_k = window.s_kq + i * padded_value + at;
      float* s_q = window.s_kq + (window.length + i) * padded_value + at;
      const float* a = window.scores + i * window.score_stride;
      const float* b = window.scores + (window.length + i) * window.score_stride;
      const float decay = window.decay_from_start[i];
      L delta[kBlocks];
      L out[kBlocks];
      for (int n = 0; n < kBlocks; ++n) {
        delta[n] =
            (simd::load<L>(d + n * kLanesOf<L>) - simd::load<L>(s_k + n * kLanesOf<L>) * decay) *
            window.beta[i];
        out[n] = simd::load<L>(s_q + n * kLanesOf<L>) * decay;
      }
      for (std::int64_t j = 0; j < i; ++j) {
        const float* earlier = window.d + j * padded_value + at;
        for (int n = 0; n < kBlocks; ++n) {
          const L d_j = simd::load<L>(earlier + n * kLanesOf<L>);
          delta[n] -= a[j] * d_j;
          out[n] += b[j] * d_j;
        }
      }
      for (int n = 0; n < kBlocks; ++n) {
        simd::store(d + n * kLanesOf<L>, delta[n]);
        simd::store(s_q + n * kLanesOf<L>, out[n] + b[i] * delta[n]);
      }
    }
  }
  return at;
}

template <typename L>
DELTAFLASH_INLINE void solve_lanes(Window& window, std::int64_t padded_key,
                                   std::int64_t padded_value) {
  const std::int64_t length = window.length;
  for (std::int64_t part = 0; part < 2; ++part) {
    for (std::int64_t i = 0; i < length; i += kLanesOf<L>) {
      const std::int64_t x = part * length + i;
      simd::dot_matrix<L>(window.kq, padded_key, std::min(length, i + kLanesOf<L>),
                          window.kq + x * padded_key, padded_key, std::min(kLanesOf<L>, length - i),
                          padded_key, window.scores + x * window.score_stride, window.score_stride);
    }
  }
  for (std::int64_t i = 0; i < length; ++i) {
    decay_since(window.sum_g.data(), i + 1, window.sum_g[static_cast<std::size_t>(i)],
                window.decay);
    float* a = window.scores + i * window.score_stride;
    float* b = window.scores + (length + i) * window.score_stride;
    for (std::int64_t j = 0; j <= i; ++j) {
      a[j] *= window.beta[i] * window.decay[j];
      b[j] *= window.decay[j];
    }
  }
  std::int64_t at = solve_blocks<L, 4>(window, padded_value, 0);
  solve_blocks<L, 1>(window, padded_value, at);
}

/// From kq, v, the gates and s_kq: D into window.d, the outputs in place of S q_i.
void solve(Window& window, std::int64_t padded_key, std::int64_t padded_value) {
  simd::for_machine([&](auto tag) DELTAFLASH_INLINE_LAMBDA {
    solve_lanes<typename decltype(tag)::type>(window, padded_key, padded_value);
  });
}

void store_outputs(const GatedDeltaNet& args, const Head& head, std::int64_t first_token,
                   const Window& window) {
  const std::int64_t padded_value = simd::round_up(args.value_dim);
  float* out = static_cast<float*>(args.out) +
               (first_token * args.num_value_heads + head.value_head) * args.value_dim;
  for (std::int64_t i = 0; i < window.length; ++i) {
    std::memcpy(out + i * args.num_value_heads * args.value_dim,
                window.s_kq + (window.length + i) * padded_value,
                static_cast<std::size_t>(args.value_dim) * sizeof(float));
  }
}

void zero_outputs(const GatedDeltaNet& args, const Row& row, std::int64_t value_head) {
  float* out = static_cast<float*>(args.out) +
               (row.begin * args.num_value_heads + value_head) * args.value_dim;
  for (std::int64_t i = 0; i < row.length; ++i) {
    std::fill_n(out + i * args.num_value_heads * args.value_dim, args.value_dim, 0.0f);
  }
}

/// Copies a state [value_dim, key_dim] between the pool and scratch memory with padded rows.
void copy_state(const float* from, std::int64_t from_stride, float* to, std::int64_t to_stride,
                std::int64_t key_dim, std::int64_t num_rows) {
  for (std::int64_t v = 0; v < num_rows; ++v) {
    std::memcpy(to + v * to_stride, from + v * from_stride,
                static_cast<std::size_t>(key_dim) * sizeof(float));
    if (to_stride > key_dim) {
      std::fill(to + v * to_stride + key_dim, to + (v + 1) * to_stride, 0.0f);
    }
  }
}

void prefill_head(const GatedDeltaNet& args, const Row& row, std::int64_t value_head,
                  Window& window, float* state) {
  const Head head(args, row.slot, value_head);
  const std::int64_t padded_key = simd::round_up(args.key_dim);
  const std::int64_t padded_value = simd::round_up(args.value_dim);
  if (row.kv_len == 0) {
    std::fill_n(state, args.value_dim * padded_key, 0.0f);
  } else {
    copy_state(head.state, args.key_dim, state, padded_key, args.key_dim, args.value_dim);
  }
  for (std::int64_t done = 0; done < row.length;) {
    const std::int64_t to_border = kChunk - (row.kv_len + done) % kChunk;
    const std::int64_t length = std::min(to_border, row.length - done);
    load_window(args, head, row.begin + done, length, window);
    dot_all(state, padded_key, args.value_dim, window.kq, padded_key, 2 * length, padded_key,
            window.s_kq, padded_value);
    solve(window, padded_key, padded_value);
    store_outputs(args, head, row.begin + done, window);
    const double last = window.sum_g[static_cast<std::size_t>(length) - 1];
    decay_since(window.sum_g.data(), length, last, window.decay);
    scale_rows(window.d, length, padded_value, window.decay);
    fold(state, args.value_dim, padded_key, window.decay_from_start[length - 1], window.d,
         padded_value, window.kq, length);
    done += length;
  }
  copy_state(state, padded_key, head.state, args.key_dim, args.key_dim, args.value_dim);
}

/// S x for the window's keys and queries, S with the history in it; folds it where asked.
void apply_state(const GatedDeltaNet& args, const Row& row, const Head& head, bool flush,
                 const History& history, Window& window, float* history_scores, float* staged) {
  const std::int64_t padded_key = simd::round_up(args.key_dim);
  const std::int64_t padded_value = simd::round_up(args.value_dim);
  const std::int64_t num_x = 2 * window.length;
  if (row.kv_len == 0) {
    // The slot's old state stays unread; the commit makes kv_len positive, so it must not stay.
    std::fill_n(head.state, args.value_dim * args.key_dim, 0.0f);
    std::fill_n(window.s_kq, num_x * padded_value, 0.0f);
    return;
  }
  const bool folds = flush && history.length > 0;
  for (std::int64_t v = 0; v < args.value_dim; v += kStateRows) {
    const std::int64_t num_rows = std::min(kStateRows, args.value_dim - v);
    float* rows = head.state + v * args.key_dim;
    if (padded_key != args.key_dim) {
      copy_state(rows, args.key_dim, staged, padded_key, args.key_dim, num_rows);
    }
    float* padded_rows = padded_key == args.key_dim ? rows : staged;
    if (folds) {
      fold(padded_rows, num_rows, padded_key, history.decay, history.weighted_d + v, padded_value,
           history.k, history.length);
      if (padded_rows != rows) {
        copy_state(padded_rows, padded_key, rows, args.key_dim, args.key_dim, num_rows);
      }
    }
    dot_all(padded_rows, padded_key, num_rows, window.kq, padded_key, num_x, padded_key,
            window.s_kq + v, padded_value);
  }
  if (!folds && history.length > 0) {
    const std::int64_t score_stride = simd::round_up(history.length);
    dot_all(history.k, padded_key, history.length, window.kq, padded_key, num_x, padded_key,
            history_scores, score_stride);
    add_history(window.s_kq, num_x, padded_value, history.decay, history_scores, score_stride,
                history.weighted_d, history.length);
  }
}

void append_records(const GatedDeltaNet& args, const Row& row, const Head& head,
                    const Window& window) {
  const std::int64_t padded_key = simd::round_up(args.key_dim);
  const std::int64_t padded_value = simd::round_up(args.value_dim);
  for (std::int64_t i = 0; i < window.length; ++i) {
    // The same row with and without a flush: a flush moves the base behind the history.
    const std::int64_t at = (row.ring_base + row.ring_history + i) & (args.ring_rows - 1);
    std::memcpy(head.ring_d + at * args.value_dim, window.d + i * padded_value,
                static_cast<std::size_t>(args.value_dim) * sizeof(float));
    head.ring_g[at] = window.g[i];
    if (head.first_of_group) {
      std::memcpy(head.ring_k + at * args.key_dim, window.kq + i * padded_key,
                  static_cast<std::size_t>(args.key_dim) * sizeof(float));
    }
  }
}

void verify_head(const GatedDeltaNet& args, const Row& row, std::int64_t value_head, Window& window,
                 History& history, float* history_scores, float* staged) {
  const Head head(args, row.slot, value_head);
  load_window(args, head, row.begin, row.length, window);
  load_history(args, head, row.ring_base, row.ring_history, history);
  apply_state(args, row, head, flushes(row.ring_history, row.length, args.history_limit), history,
              window, history_scores, staged);
  solve(window, simd::round_up(args.key_dim), simd::round_up(args.value_dim));
  store_outputs(args, head, row.begin, window);
  append_records(args, row, head, window);
}

[[noreturn]] void refuse(const std::string& op, const std::string& expected,
                         const std::string& found) {
  throw std::invalid_argument(op + ": expected " + expected + ", got " + found);
}

void check_dims(const GatedDeltaNet& args, const std::string& op) {
  if (args.dtype != DType::kFloat32) {
    refuse(op, "dtype float32", std::string(name_of(args.dtype)));
  }
  if (args.num_key_heads <= 0 || args.num_value_heads <= 0 ||
      args.num_value_heads % args.num_key_heads != 0) {
    refuse(op, "num_value_heads to be a positive multiple of num_key_heads",
           std::to_string(args.num_value_heads) + " and " + std::to_string(args.num_key_heads));
  }
  if (args.key_dim <= 0 || args.value_dim <= 0) {
    refuse(op, "positive head dims",
           std::to_string(args.key_dim) + " and " + std::to_string(args.value_dim));
  }
}

void check_strides(const GatedDeltaNet& args, const std::string& op) {
  const std::int64_t width =
      2 * args.num_key_heads * args.key_dim + args.num_value_heads * args.value_dim;
  if (args.qkv_stride < width) {
    refuse(op, "qkv_stride >= " + std::to_string(width), std::to_string(args.qkv_stride));
  }
  if (args.ba_stride < 2 * args.num_value_heads) {
    refuse(op, "ba_stride >= " + std::to_string(2 * args.num_value_heads),
           std::to_string(args.ba_stride));
  }
}

void check_ring(const GatedDeltaNet& args, const std::string& op) {
  if (args.ring_dtype != DType::kFloat32) {
    refuse(op, "ring_dtype float32", std::string(name_of(args.ring_dtype)));
  }
  if (args.ring_rows <= 0 || !std::has_single_bit(static_cast<std::uint64_t>(args.ring_rows))) {
    refuse(op, "ring_rows to be a power of two", std::to_string(args.ring_rows));
  }
  if (args.history_limit < 0) {
    refuse(op, "history_limit >= 0", std::to_string(args.history_limit));
  }
}

}  // namespace

void gated_delta_net_prefill(const GatedDeltaNet& args, Stream stream) {
  const std::string op = "gated_delta_net_prefill";
  check_dims(args, op);
  check_strides(args, op);
  for (std::int64_t r = 0; r < args.rows.num_rows; ++r) {
    const Row row = row_at(args, r);
    if (row.ring_history != 0) {
      refuse(op, "an empty ring in slot " + std::to_string(row.slot),
             std::to_string(row.ring_history) + " records");
    }
  }
  const std::int64_t padded_key = simd::round_up(args.key_dim);
  const std::int64_t padded_value = simd::round_up(args.value_dim);
  const std::int64_t capacity = std::min(kChunk, longest_row(args.rows));
  const std::int64_t work = std::max<std::int64_t>(1, args.key_dim * args.value_dim * 3 * capacity);
  parallel_for(stream, args.rows.num_rows * args.num_value_heads,
               std::max<std::int64_t>(1, kGrain / work), [&](std::int64_t begin, std::int64_t end) {
                 simd::Scratch scratch(Window::scratch_size(capacity, padded_key, padded_value) +
                                       args.value_dim * padded_key);
                 Window window(capacity, padded_key, padded_value, scratch);
                 float* state = scratch.take(args.value_dim * padded_key);
                 for (std::int64_t task = begin; task < end; ++task) {
                   const Row row = row_at(args, task / args.num_value_heads);
                   const std::int64_t value_head = task % args.num_value_heads;
                   if (row.slot < 0) {
                     zero_outputs(args, row, value_head);
                   } else if (row.length > 0) {
                     prefill_head(args, row, value_head, window, state);
                   }
                 }
               });
}

void gated_delta_net_verify(const GatedDeltaNet& args, Stream stream) {
  const std::string op = "gated_delta_net_verify";
  check_dims(args, op);
  check_strides(args, op);
  check_ring(args, op);
  std::int64_t most_history = 0;
  for (std::int64_t r = 0; r < args.rows.num_rows; ++r) {
    const Row row = row_at(args, r);
    if (row.ring_history + row.length > args.ring_rows) {
      refuse(op,
             "ring_rows >= history + row length, " + std::to_string(row.ring_history + row.length) +
                 " in row " + std::to_string(r),
             std::to_string(args.ring_rows));
    }
    most_history = std::max(most_history, row.ring_history);
  }
  const std::int64_t padded_key = simd::round_up(args.key_dim);
  const std::int64_t padded_value = simd::round_up(args.value_dim);
  const std::int64_t capacity = longest_row(args.rows);
  const std::int64_t work =
      std::max<std::int64_t>(1, args.key_dim * args.value_dim * (2 * capacity + most_history));
  parallel_for(
      stream, args.rows.num_rows * args.num_value_heads, std::max<std::int64_t>(1, kGrain / work),
      [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t score_size = 2 * capacity * simd::round_up(most_history);
        simd::Scratch scratch(Window::scratch_size(capacity, padded_key, padded_value) +
                              History::scratch_size(most_history, padded_key, padded_value) +
                              score_size + kStateRows * padded_key);
        Window window(capacity, padded_key, padded_value, scratch);
        History history(most_history, padded_key, padded_value, scratch);
        float* history_scores = scratch.take(score_size);
        float* staged = scratch.take(kStateRows * padded_key);
        for (std::int64_t task = begin; task < end; ++task) {
          const Row row = row_at(args, task / args.num_value_heads);
          const std::int64_t value_head = task % args.num_value_heads;
          if (row.slot < 0) {
            zero_outputs(args, row, value_head);
          } else if (row.length > 0) {
            verify_head(args, row, value_head, window, history, history_scores, staged);
          }
        }
      });
}

void gated_delta_net_materialize(const GatedDeltaNet& args, std::int64_t slot,
                                 std::int64_t num_records, float* out) {
  const std::string op = "gated_delta_net_materialize";
  check_dims(args, op);
  check_ring(args, op);
  if (slot < 0) {
    refuse(op, "slot >= 0", std::to_string(slot));
  }
  const SlotState& cursors = args.table[slot];
  if (num_records < 0 || num_records > cursors.ring_history) {
    refuse(op, "num_records in [0, " + std::to_string(cursors.ring_history) + "]",
           std::to_string(num_records));
  }
  const std::int64_t padded_key = simd::round_up(args.key_dim);
  const std::int64_t padded_value = simd::round_up(args.value_dim);
  simd::Scratch scratch(History::scratch_size(num_records, padded_key, padded_value) +
                        args.value_dim * padded_key);
  History history(num_records, padded_key, padded_value, scratch);
  float* state = scratch.take(args.value_dim * padded_key);
  for (std::int64_t value_head = 0; value_head < args.num_value_heads; ++value_head) {
    const Head head(args, slot, value_head);
    float* to = out + value_head * args.value_dim * args.key_dim;
    if (cursors.kv_len == 0) {
      std::fill_n(to, args.value_dim * args.key_dim, 0.0f);
      continue;
    }
    copy_state(head.state, args.key_dim, state, padded_key, args.key_dim, args.value_dim);
    if (num_records > 0) {
      load_history(args, head, cursors.ring_base, num_records, history);
      fold(state, args.value_dim, padded_key, history.decay, history.weighted_d, padded_value,
           history.k, num_records);
    }
    copy_state(state, padded_key, to, args.key_dim, args.key_dim, args.value_dim);
  }
}

}  // namespace deltaflash::cpu
