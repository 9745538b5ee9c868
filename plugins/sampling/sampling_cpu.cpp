#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "plugins/common/simd.h"
#include "plugins/common/thread_pool.h"
#include "plugins/sampling/logit_rules.h"
#include "plugins/sampling/philox.h"
#include "plugins/sampling/sampling.h"

namespace deltaflash {

float stream_uniform(std::uint64_t seed, std::uint64_t index, std::uint32_t lane) {
  const auto words = philox4x32(
      {static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32), lane, 0},
      {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
  return static_cast<float>(words[0] >> 8) * 0x1p-24f;  // 24 bits: exact in fp32, never 1
}

namespace cpu {
namespace {

using simd::Lanes;
using IntLanes = std::int32_t __attribute__((vector_size(64)));
using Doubles = double __attribute__((vector_size(64)));
using Longs = std::uint64_t __attribute__((vector_size(64)));
using HalfLanes = float __attribute__((vector_size(32)));
using HalfInts = std::int32_t __attribute__((vector_size(32)));

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int64_t kBlock = 128;     // logits that a scan looks at together
constexpr int kBuckets = 4096;           // of the probability histogram
constexpr double kMaxRange = 64.0;       // natural logs that the histogram resolves
constexpr std::int64_t kExpBatch = 512;  // logits between two passes of the histogram

// e^x for x <= 0 within 2 ulp; 0 below -708, where the result would be near the subnormals. Taylor
// to the 13th power on |r| <= ln(2) / 2: the remainder is below 1e-17.
DELTAFLASH_INLINE Doubles exp_nonpositive(Doubles x) {
  constexpr double kLowest = -708.0;
  constexpr double kRound = 0x1.8p52;  // adding it leaves the integer in the low bits
  const Doubles low = kLowest - Doubles{};
  const Doubles y = x < low ? low : x;
  const Doubles shifted = y * 1.4426950408889634 + kRound;
  const Doubles n = shifted - kRound;
  const Doubles r = (y - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6;
  Doubles p = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  const Longs exponent = (std::bit_cast<Longs>(shifted) << 52) + (std::uint64_t{1023} << 52);
  return x < low ? Doubles{} : p * std::bit_cast<Doubles>(exponent);
}

struct Candidate {
  float logit;
  std::int32_t id;
};

// The order of the law: falling probability, ties by id.
bool comes_before(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// Lowest id of the largest logit. NaN never wins; without a number above -inf it is id 0.
DELTAFLASH_SIMD std::int32_t arg_max(const float* logits, std::int64_t count) {
  constexpr int kChains = 2;
  constexpr IntLanes kLanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Lanes best[kChains] = {simd::broadcast(-kInfinity), simd::broadcast(-kInfinity)};
  IntLanes ids[kChains] = {};
  std::int64_t i = 0;
  IntLanes here = kLanes;
  for (; i + 16 * kChains <= count; i += 16 * kChains) {
#pragma GCC unroll 2
    for (int c = 0; c < kChains; ++c) {
      const Lanes v = simd::load(logits + i + std::int64_t{16} * c);
      const IntLanes wins = v > best[c];
      best[c] = wins ? v : best[c];
      ids[c] = wins ? here + 16 * c : ids[c];
    }
    here += 16 * kChains;
  }
  float highest = -kInfinity;
  std::int32_t id = 0;
  for (int c = 0; c < kChains; ++c) {
    for (int lane = 0; lane < 16; ++lane) {
      const bool tie_below = best[c][lane] == highest && ids[c][lane] < id;
      if (best[c][lane] > highest || tie_below) {
        highest = best[c][lane];
        id = ids[c][lane];
      }
    }
  }
  for (; i < count; ++i) {
    if (logits[i] > highest) {
      highest = logits[i];
      id = static_cast<std::int32_t>(i);
    }
  }
  return id;
}

struct Extent {
  float low;   // the smallest logit above -inf
  float high;  // the largest; -inf if there is none
};

DELTAFLASH_SIMD Extent extent_of(const float* logits, std::int64_t count) {
  Lanes low = simd::broadcast(kInfinity);
  Lanes high = simd::broadcast(-kInfinity);
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const Lanes v = simd::load(logits + i);
    high = v > high ? v : high;
    const Lanes number = v > -kInfinity ? v : simd::broadcast(kInfinity);
    low = number < low ? number : low;
  }
  Extent extent{kInfinity, -kInfinity};
  for (int lane = 0; lane < 16; ++lane) {
    extent.high = std::max(extent.high, high[lane]);
    extent.low = std::min(extent.low, low[lane]);
  }
  for (; i < count; ++i) {
    extent.high = logits[i] > extent.high ? logits[i] : extent.high;
    extent.low = logits[i] < extent.low && logits[i] > -kInfinity ? logits[i] : extent.low;
  }
  return extent;
}

DELTAFLASH_INLINE float max_lane(Lanes v) {
  const auto fold = [](Lanes a, Lanes b) __attribute__((always_inline)) { return a > b ? a : b; };
  v = fold(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = fold(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = fold(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = fold(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return v[0];
}

// First of the blocks from `begin` on that may hold a logit in [low, high]; `count` if none does.
DELTAFLASH_SIMD std::int64_t find_block(const float* logits, std::int64_t begin, std::int64_t count,
                                        float low, float high) {
  const Lanes none = simd::broadcast(-kInfinity);
  for (; begin + kBlock <= count; begin += kBlock) {
    Lanes top = none;
#pragma GCC unroll 8
    for (int i = 0; i < kBlock; i += 16) {
      const Lanes v = simd::load(logits + begin + i);
      const Lanes eligible = v <= high ? v : none;
      top = eligible > top ? eligible : top;
    }
    if (max_lane(top) >= low) {
      break;
    }
  }
  return std::min(begin, count);
}

// How a temperature maps logits to distances from the top, in natural logs of probability, and
// those to buckets. Both are monotone: bucket order is the order of the law.
struct Scale {
  double high;  // the largest logit
  double inv_temperature;
  double buckets_per_nat;

  double distance(float logit) const {
    return (high - static_cast<double>(logit)) * inv_temperature;
  }
  int bucket(double distance) const {
    return static_cast<int>(std::min<double>(distance * buckets_per_nat, kBuckets - 1));
  }
};

// mass[b] = sum of exp(-distance) over the logits of bucket b, in order of their ids.
DELTAFLASH_SIMD void add_up_buckets(const float* logits, std::int64_t count, const Scale& scale,
                                    double* mass) {
  alignas(64) double weights[kExpBatch];
  alignas(64) std::int32_t buckets[kExpBatch];
  for (std::int64_t first = 0; first < count; first += kExpBatch) {
    const std::int64_t batch = std::min(kExpBatch, count - first);
    for (std::int64_t i = 0; i < batch; i += 8) {
      HalfLanes v = -kInfinity - HalfLanes{};
      if (i + 8 <= batch) {
        std::memcpy(&v, logits + first + i, sizeof(v));
      } else {
        std::memcpy(&v, logits + first + i, static_cast<std::size_t>(batch - i) * sizeof(float));
      }
      v = v > -kInfinity ? v : -kInfinity - HalfLanes{};  // NaN too
      const Doubles distance =
          (scale.high - __builtin_convertvector(v, Doubles)) * scale.inv_temperature;
      Doubles place = distance * scale.buckets_per_nat;
      place = place < kBuckets - 1.0 ? place : kBuckets - 1.0 - Doubles{};
      const HalfInts bucket = __builtin_convertvector(place, HalfInts);
      const Doubles weight = exp_nonpositive(-distance);
      std::memcpy(buckets + i, &bucket, sizeof(bucket));
      std::memcpy(weights + i, &weight, sizeof(weight));
    }
    for (std::int64_t i = 0; i < batch; ++i) {
      mass[buckets[i]] += weights[i];
    }
  }
}

// The first k candidates in the order of the law, sorted; fewer if fewer lie above -inf.
void select_top_k(const float* logits, std::int64_t count, std::int64_t k,
                  std::vector<Candidate>& chosen) {
  chosen.clear();
  const auto limit = static_cast<std::size_t>(std::max<std::int64_t>(2 * k, 1024));
  const auto keep_k = [&] {
    std::nth_element(chosen.begin(), chosen.begin() + (k - 1), chosen.end(), comes_before);
    chosen.resize(static_cast<std::size_t>(k));
  };
  // What ties with the k-th so far has a higher id, so only strictly larger logits can displace it.
  float above = -kInfinity;
  for (std::int64_t i = 0; i < count;) {
    i = find_block(logits, i, count, std::nextafter(above, kInfinity), kInfinity);
    const std::int64_t end = std::min(i + kBlock, count);
    for (; i < end; ++i) {
      if (logits[i] > above) {
        chosen.push_back({logits[i], static_cast<std::int32_t>(i)});
      }
    }
    if (chosen.size() >= limit) {
      keep_k();
      above = chosen.back().logit;
    }
  }
  if (chosen.size() > static_cast<std::size_t>(k)) {
    keep_k();
  }
  std::sort(chosen.begin(), chosen.end(), comes_before);
}

// Draws from a sorted list that holds every candidate with probability, after top_k.
std::int32_t draw_from_list(const std::vector<Candidate>& list, const Scale& scale,
                            const SlotState& state, double reach, double uniform) {
  thread_local std::vector<double> weights;
  weights.clear();
  double total = 0.0;
  for (const Candidate& candidate : list) {
    weights.push_back(std::exp(-scale.distance(candidate.logit)));
    total += weights.back();
  }
  const double border = state.top_p < 1.0f ? static_cast<double>(state.top_p) * total : total;
  std::size_t kept = 0;
  double mass = 0.0;
  while (kept < list.size() && (kept == 0 || state.top_p >= 1.0f || mass < border) &&
         (kept == 0 || scale.distance(list[kept].logit) <= reach)) {
    mass += weights[kept++];
  }
  const double target = uniform * mass;
  double sum = 0.0;
  std::size_t i = 0;
  while (i + 1 < kept && (sum += weights[i]) <= target) {
    ++i;
  }
  return list[i].id;
}

// Draws without top_k: a histogram of the probabilities finds the buckets in which the nucleus
// ends and the draw falls; only those are sorted.
std::int32_t draw_from_histogram(const float* logits, std::int64_t count, const Extent& extent,
                                 Scale scale, const SlotState& state, double reach,
                                 double uniform) {
  const double range = std::min(scale.distance(extent.low), kMaxRange);
  scale.buckets_per_nat = range > 1e-30 ? kBuckets / range : 0.0;

  thread_local std::vector<double> mass;
  mass.assign(kBuckets, 0.0);
  add_up_buckets(logits, count, scale, mass.data());

  thread_local std::vector<Candidate> members;
  const auto sort_bucket = [&](int bucket) {
    // Scan a range of logits that is a little wide, then ask for the bucket itself.
    members.clear();
    const double margin = 1e-6 * (std::abs(scale.high) + std::abs(double{extent.low})) + 1e-30;
    const double nats = scale.buckets_per_nat > 0.0 ? 1.0 / scale.buckets_per_nat : 0.0;
    const double logits_per_bucket = nats / scale.inv_temperature;
    const auto high = static_cast<float>(scale.high - bucket * logits_per_bucket + margin);
    const auto low =
        bucket == kBuckets - 1 || nats == 0.0
            ? extent.low
            : static_cast<float>(scale.high - (bucket + 1) * logits_per_bucket - margin);
    for (std::int64_t i = 0; i < count;) {
      i = find_block(logits, i, count, low, high);
      const std::int64_t end = std::min(i + kBlock, count);
      for (; i < end; ++i) {
        if (logits[i] >= low && logits[i] <= high &&
            scale.bucket(scale.distance(logits[i])) == bucket) {
          members.push_back({logits[i], static_cast<std::int32_t>(i)});
        }
      }
    }
    std::sort(members.begin(), members.end(), comes_before);
  };
  const auto weight_of = [&](const Candidate& candidate) {
    return std::exp(-scale.distance(candidate.logit));
  };

  // The kept prefix of the order: all buckets before `last`, and `last_kept` members of `last`.
  int last = kBuckets - 1;
  auto last_kept = std::numeric_limits<std::size_t>::max();
  double kept_mass = 0.0;
  for (const double m : mass) {
    kept_mass += m;
  }
  const double total = kept_mass;
  if (state.top_p < 1.0f) {
    const double border = static_cast<double>(state.top_p) * total;
    double sum = 0.0;
    int bucket = 0;
    while (bucket + 1 < kBuckets && sum + mass[static_cast<std::size_t>(bucket)] < border) {
      sum += mass[static_cast<std::size_t>(bucket++)];
    }
    sort_bucket(bucket);
    std::size_t kept = 0;
    while (kept < members.size() && ((bucket == 0 && kept == 0) || sum < border)) {
      sum += weight_of(members[kept++]);
    }
    last = bucket;
    last_kept = kept;
    kept_mass = sum;
  }
  if (std::isfinite(reach)) {
    const int bucket = scale.bucket(reach);
    if (bucket <= last) {
      double sum = 0.0;
      for (int b = 0; b < bucket; ++b) {
        sum += mass[static_cast<std::size_t>(b)];
      }
      sort_bucket(bucket);
      const std::size_t most = bucket < last ? members.size() : std::min(last_kept, members.size());
      std::size_t kept = 0;
      while (kept < most && scale.distance(members[kept].logit) <= reach) {
        sum += weight_of(members[kept++]);
      }
      last = bucket;
      last_kept = kept;
      kept_mass = sum;
    }
  }

  const double target = uniform * kept_mass;
  double sum = 0.0;
  int bucket = 0;
  while (bucket < last && sum + mass[static_cast<std::size_t>(bucket)] <= target) {
    sum += mass[static_cast<std::size_t>(bucket++)];
  }
  sort_bucket(bucket);
  std::size_t most = bucket < last ? members.size() : std::min(last_kept, members.size());
  while (most == 0 && bucket > 0) {  // rounding only: the draw lies in the last bucket before
    sort_bucket(--bucket);
    most = members.size();
  }
  std::size_t i = 0;
  while (i + 1 < most && (sum += weight_of(members[i])) <= target) {
    ++i;
  }
  return members[i].id;
}

std::int32_t sample(const float* logits, std::int64_t count, const SlotState& state,
                    std::uint64_t index) {
  if (!(state.temperature > 0.0f) || state.top_k == 1) {
    return arg_max(logits, count);
  }
  const Extent extent = extent_of(logits, count);
  if (!std::isfinite(extent.high)) {
    return arg_max(logits, count);
  }
  const double uniform = stream_uniform(state.seed, index, 0);
  // Never 0, or the distance of a logit of -inf would be NaN at an infinite temperature.
  const double inv_temperature = std::max(1.0 / static_cast<double>(state.temperature), 1e-300);
  const Scale scale{extent.high, inv_temperature, 0.0};
  // min_p as a distance: exp(-distance) >= min_p.
  const double reach = state.min_p > 0.0f
                           ? std::max(0.0, -std::log(static_cast<double>(state.min_p)))
                           : std::numeric_limits<double>::infinity();
  if (state.top_k > 0 && state.top_k < count) {
    thread_local std::vector<Candidate> list;
    select_top_k(logits, count, state.top_k, list);
    return draw_from_list(list, scale, state, reach, uniform);
  }
  return draw_from_histogram(logits, count, extent, scale, state, reach, uniform);
}

bool is_end_id(const SlotState& state, std::int32_t token) {
  const std::int32_t* end = state.end_ids + std::min(state.num_end_ids, kMaxEndIds);
  return std::find(state.end_ids, end, token) != end;
}

// The logits at one position of a row under the rules of its slot. `drafts` are those before the
// position: tokens that the row emits.
const float* rule_logits(const SampleAccept& args, std::int64_t slot, const float* logits,
                         std::span<const std::int32_t> drafts, std::int64_t index) {
  const SlotState& state = args.table[slot];
  if (!has_rules(state)) {
    return logits;
  }
  thread_local std::vector<float> ruled;
  ruled.assign(logits, logits + args.vocab_size);
  const bool penalties = args.token_counts != nullptr && has_penalties(state);
  const std::uint16_t* counts = penalties ? args.token_counts + slot * args.vocab_size : nullptr;
  const auto rule = [&](std::int64_t id, float bias) {
    const auto num_drafted = penalties ? std::count(drafts.begin(), drafts.end(), id) : 0;
    ruled[static_cast<std::size_t>(id)] =
        ruled_logit(state, logits[id], penalties ? counts[id] : std::uint16_t{0},
                    static_cast<std::int32_t>(num_drafted), bias);
  };
  if (penalties) {
    for (std::int64_t id = 0; id < args.vocab_size; ++id) {
      if (counts[id] != 0) {
        rule(id, 0.0F);
      }
    }
    for (const std::int32_t id : drafts) {
      rule(id, 0.0F);
    }
  }
  if (args.bias_ids != nullptr) {
    const std::int64_t first = slot * kMaxLogitBiases;
    for (std::int64_t i = first; i < first + std::min(state.num_biases, kMaxLogitBiases); ++i) {
      rule(args.bias_ids[i], args.bias_values[i]);
    }
  }
  if (index < state.min_tokens) {
    for (std::int32_t i = 0; i < std::min(state.num_end_ids, kMaxEndIds); ++i) {
      if (state.end_ids[i] >= 0 && state.end_ids[i] < args.vocab_size) {
        ruled[static_cast<std::size_t>(state.end_ids[i])] = -kInfinity;
      }
    }
  }
  return ruled.data();
}

void accept_row(const SampleAccept& args, std::int64_t row) {
  const std::int64_t width = args.max_emitted;
  std::int32_t* tokens = args.tokens + row * width;
  std::fill_n(tokens, width, -1);
  args.num_emitted[row] = 0;
  args.num_accepted[row] = 0;
  args.finish_reason[row] = static_cast<std::int32_t>(FinishReason::kNotFinished);
  const std::int64_t slot = args.rows.slots[row];
  if (slot < 0) {
    return;
  }
  const SlotState& state = args.table[slot];
  args.finish_reason[row] = state.finish_reason;
  const std::int64_t start = args.sample_start[row];
  const std::int64_t len = args.sample_len[row];
  if (state.finish_reason != static_cast<std::int32_t>(FinishReason::kNotFinished) || start < 0 ||
      len <= 0) {
    return;
  }

  const std::int64_t num_forced = args.forced == nullptr || state.forced_drafts != 0
                                      ? 0
                                      : std::min<std::int64_t>(state.num_forced, args.max_forced);
  const std::int32_t* drafts = args.token_ids + args.rows.row_start[row] + 1;
  std::int32_t sampled = 0;
  while (true) {
    const std::int64_t index = std::int64_t{state.num_emitted} + sampled;
    const std::int32_t token =
        args.forced != nullptr && index < num_forced
            ? args.forced[slot * args.max_forced + index]
            : sample(rule_logits(args, slot, args.logits + (start + sampled) * args.vocab_size,
                                 {drafts, static_cast<std::size_t>(sampled)}, index),
                     args.vocab_size, state, static_cast<std::uint64_t>(index));
    tokens[sampled] = token;
    if (sampled + 1 >= len || drafts[sampled] != token) {
      break;
    }
    ++sampled;
  }
  args.num_accepted[row] = sampled;

  std::int32_t emitted = std::min(sampled + 1, std::max(state.num_remaining, 0));
  FinishReason reason =
      emitted >= state.num_remaining ? FinishReason::kLength : FinishReason::kNotFinished;
  for (std::int32_t i = 0; i < emitted; ++i) {
    if (is_end_id(state, tokens[i])) {
      emitted = i + 1;
      reason = FinishReason::kEndId;
    }
  }
  std::fill(tokens + emitted, tokens + width, -1);
  args.num_emitted[row] = emitted;
  args.finish_reason[row] = static_cast<std::int32_t>(reason);
}

}  // namespace

void sample_accept(const SampleAccept& args, Stream stream) {
  if (args.vocab_size <= 0) {
    throw std::invalid_argument("sample_accept: expected vocab_size > 0, got " +
                                std::to_string(args.vocab_size));
  }
  for (std::int64_t row = 0; row < args.rows.num_rows; ++row) {
    if (args.rows.slots[row] >= 0 && args.sample_len[row] > args.max_emitted) {
      throw std::invalid_argument(
          "sample_accept: expected sample_len of at most " + std::to_string(args.max_emitted) +
          ", got " + std::to_string(args.sample_len[row]) + " in row " + std::to_string(row));
    }
  }
  parallel_for(stream, args.rows.num_rows, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      accept_row(args, row);
    }
  });
}

}  // namespace cpu
}  // namespace deltaflash
