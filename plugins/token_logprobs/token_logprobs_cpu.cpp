#include <array>
#include <cmath>
#include <stdexcept>
#include <string>

#include "plugins/common/simd.h"
#include "plugins/common/thread_pool.h"
#include "plugins/token_logprobs/token_logprobs.h"

namespace deltaflash::cpu {
namespace {

using simd::Lanes;
using IntLanes = std::int32_t __attribute__((vector_size(64)));

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int64_t kBlock = 128;  // logits that are added in fp32, and looked at together

struct Candidate {
  float logit;
  std::int32_t id;
};

// The likeliest so far, in the order of the manual; places not taken yet are -inf.
struct Top {
  std::array<Candidate, kMaxTopLogprobs> at;
  std::int64_t count;

  float last() const { return at[static_cast<std::size_t>(count - 1)].logit; }

  // Ids come rising: what ties with an entry goes behind it.
  void offer(float logit, std::int32_t id) {
    if (!(logit > last())) {
      return;
    }
    std::int64_t place = count - 1;
    for (; place > 0 && at[static_cast<std::size_t>(place - 1)].logit < logit; --place) {
      at[static_cast<std::size_t>(place)] = at[static_cast<std::size_t>(place - 1)];
    }
    at[static_cast<std::size_t>(place)] = {logit, id};
  }
};

// First block from `begin` on that holds a logit above `above`; where the whole blocks end if none.
DELTAFLASH_SIMD std::int64_t find_above(const float* logits, std::int64_t begin, std::int64_t count,
                                        float above) {
  for (; begin + kBlock <= count; begin += kBlock) {
    IntLanes found = {};
#pragma GCC unroll 8
    for (int i = 0; i < kBlock; i += 16) {
      found |= simd::load(logits + begin + i) > above;
    }
    std::int32_t any = 0;
    for (int lane = 0; lane < 16; ++lane) {
      any |= found[lane];
    }
    if (any != 0) {
      break;
    }
  }
  return begin;
}

// The `k` >= 1 likeliest. Where fewer lie above -inf, the lowest ids of the others follow.
Top top_of(const float* logits, std::int64_t count, std::int64_t k) {
  Top top{.at = {}, .count = k};
  top.at.fill({-kInfinity, -1});
  for (std::int64_t i = 0; i < count;) {
    i = find_above(logits, i, count, top.last());
    const std::int64_t end = std::min(i + kBlock, count);
    for (; i < end; ++i) {
      top.offer(logits[i], static_cast<std::int32_t>(i));
    }
  }
  std::int32_t next = 0;
  for (std::int64_t place = 0; place < k; ++place) {
    Candidate& entry = top.at[static_cast<std::size_t>(place)];
    if (entry.id < 0) {
      while (logits[next] > -kInfinity) {
        ++next;
      }
      entry.id = next++;
    }
  }
  return top;
}

struct Sums {
  double mass;             // of exp(l - high)
  std::int64_t num_above;  // logits above the token's
};

// NaN is no part of either. `high` is finite, or +inf and the mass counts how many are.
DELTAFLASH_SIMD Sums sums_of(const float* logits, std::int64_t count, float high, float logit) {
  Sums sums{0.0, 0};
  const Lanes none = simd::broadcast(-kInfinity);
  for (std::int64_t first = 0; first < count; first += kBlock) {
    const std::int64_t end = std::min(first + kBlock, count);
    Lanes mass = {};
    IntLanes above = {};
    for (std::int64_t i = first; i < end; i += 16) {
      const float* from = logits + i;
      float padded[16];
      if (i + 16 > end) {
        std::fill_n(padded, 16, -kInfinity);
        std::copy(from, logits + end, padded);
        from = padded;
      }
      const Lanes raw = simd::load(from);
      const Lanes v = raw > none ? raw : none;
      // inf - inf would be NaN: +inf lies 0 below itself.
      const Lanes distance = v == high ? Lanes{} : v - high;
      mass += simd::exp(distance);
      above += v > logit;
    }
    sums.mass += static_cast<double>(simd::sum(mass));
    for (int lane = 0; lane < 16; ++lane) {
      sums.num_above -= above[lane];
    }
  }
  return sums;
}

void judge(const TokenLogprobs& args, std::int64_t row, std::int64_t i, std::int64_t k) {
  const float* logits = args.logits + (args.sample_start[row] + i) * args.vocab_size;
  const std::int64_t at = row * args.max_emitted + i;
  const Top top = top_of(logits, args.vocab_size, std::max<std::int64_t>(k, 1));
  const float high = top.at[0].logit;
  const float raw = logits[args.tokens[at]];
  const float logit = raw > -kInfinity ? raw : -kInfinity;
  const Sums sums = high > -kInfinity ? sums_of(logits, args.vocab_size, high, logit) : Sums{1, 0};
  const double log_sum = std::log(sums.mass);
  args.logprob[at] = logprob_of(logit, high, log_sum);
  args.rank[at] = static_cast<std::int32_t>(1 + sums.num_above);
  for (std::int64_t j = 0; j < k; ++j) {
    const Candidate& candidate = top.at[static_cast<std::size_t>(j)];
    args.top_ids[at * kMaxTopLogprobs + j] = candidate.id;
    args.top_logprobs[at * kMaxTopLogprobs + j] = logprob_of(candidate.logit, high, log_sum);
  }
}

}  // namespace

void token_logprobs(const TokenLogprobs& args, Stream stream) {
  if (args.vocab_size <= 0) {
    throw std::invalid_argument("token_logprobs: expected vocab_size > 0, got " +
                                std::to_string(args.vocab_size));
  }
  parallel_for(stream, args.rows.num_rows * args.max_emitted, 1,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t item = begin; item < end; ++item) {
                   const std::int64_t row = item / args.max_emitted;
                   const std::int64_t i = item % args.max_emitted;
                   if (const std::int64_t k = num_candidates(args, row, i); k >= 0) {
                     judge(args, row, i, k);
                   }
                 }
               });
}

}  // namespace deltaflash::cpu
