#include <cstdint>

#include "plugins/common/cuda_error.h"
#include "plugins/common/cuda_launch.h"
#include "plugins/common/reduce.cuh"
#include "plugins/sampling/logit_rules.h"
#include "plugins/sampling/philox.h"
#include "plugins/sampling/sampling.h"

// The law is that of sampling.h. Logits are ordered through an unsigned key that grows with them;
// what the filters keep is a prefix of the order (falling key, then rising id), so a filter is one
// number: the mass of its prefix. Masses are sums of fixed-point weights, exact in any order.

namespace deltaflash::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;
constexpr std::int64_t kMaxVocab = std::int64_t{1} << 19;  // 2^19 weights of 2^44 fit 64 bits
constexpr double kWeightOne = 0x1p44;
constexpr auto kNotFinished = static_cast<std::int32_t>(FinishReason::kNotFinished);

// A key is searched digit by digit: 10, 11 and 11 bits from the top.
constexpr int kTopBins = 1024;
constexpr int kBins = 2048;

using Mass = unsigned long long;  // as atomicAdd and the intrinsics spell std::uint64_t

// The lowest id of the largest logit, in every thread; without a logit above -inf it is 0.
__device__ Best arg_max(const float* __restrict__ logits, std::int64_t count) {
  Best best{-INFINITY, 0};
  if (count % 4 == 0) {
    for (std::int64_t i = threadIdx.x * 4; i < count; i += kThreads * 4) {
      const float4 four = *reinterpret_cast<const float4*>(logits + i);
      const auto id = static_cast<std::int32_t>(i);
      // A thread's ids rise, so a tie keeps the earlier one.
      best = four.x > best.logit ? Best{four.x, id} : best;
      best = four.y > best.logit ? Best{four.y, id + 1} : best;
      best = four.z > best.logit ? Best{four.z, id + 2} : best;
      best = four.w > best.logit ? Best{four.w, id + 3} : best;
    }
  } else {
    for (std::int64_t i = threadIdx.x; i < count; i += kThreads) {
      best = logits[i] > best.logit ? Best{logits[i], static_cast<std::int32_t>(i)} : best;
    }
  }
  return block_best<kThreads>(best);
}

__device__ __forceinline__ bool is_end_id(const SlotState& state, std::int32_t token) {
  const std::int32_t num_end_ids = min(state.num_end_ids, kMaxEndIds);
  for (std::int32_t i = 0; i < num_end_ids; ++i) {
    if (state.end_ids[i] == token) {
      return true;
    }
  }
  return false;
}

// The logits at one position of a row, under the rules of its slot.
struct Logits {
  const float* raw;
  const SlotState* state;        // null: the slot has no rules
  const std::uint16_t* counts;   // of the slot; null without penalties
  const std::int32_t* drafts;    // of the row, those before the position
  std::int32_t num_drafts;       // 0 without penalties
  const std::int32_t* bias_ids;  // of the slot, rising
  const float* bias_values;
  std::int32_t num_biases;
  bool bars_end_ids;

  __device__ __forceinline__ float operator[](std::int64_t i) const {
    return state == nullptr ? raw[i] : ruled(static_cast<std::int32_t>(i));
  }

  __device__ float ruled(std::int32_t id) const {
    if (bars_end_ids && is_end_id(*state, id)) {
      return -INFINITY;
    }
    std::int32_t num_drafted = 0;
    for (std::int32_t i = 0; i < num_drafts; ++i) {
      num_drafted += drafts[i] == id ? 1 : 0;
    }
    return ruled_logit(*state, raw[id], counts == nullptr ? std::uint16_t{0} : counts[id],
                       num_drafted, bias(id));
  }

  __device__ float bias(std::int32_t id) const {
    std::int32_t begin = 0;
    std::int32_t end = num_biases;
    while (begin < end) {
      const std::int32_t middle = (begin + end) / 2;
      if (bias_ids[middle] < id) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    return begin < num_biases && bias_ids[begin] == id ? bias_values[begin] : 0.0F;
  }
};

__device__ Logits logits_at(const SampleAccept& args, const SlotState& state, std::int64_t slot,
                            std::int64_t row, std::int64_t i, const float* raw) {
  Logits logits{raw, nullptr, nullptr, nullptr, 0, nullptr, nullptr, 0, false};
  if (!has_rules(state)) {
    return logits;
  }
  logits.state = &state;
  if (args.token_counts != nullptr && has_penalties(state)) {
    logits.counts = args.token_counts + slot * args.vocab_size;
    logits.drafts = args.token_ids + args.rows.row_start[row] + 1;
    logits.num_drafts = static_cast<std::int32_t>(i);
  }
  if (args.bias_ids != nullptr) {
    logits.bias_ids = args.bias_ids + slot * kMaxLogitBiases;
    logits.bias_values = args.bias_values + slot * kMaxLogitBiases;
    logits.num_biases = min(state.num_biases, kMaxLogitBiases);
  }
  logits.bars_end_ids = state.num_emitted + i < state.min_tokens;
  return logits;
}

__device__ Best arg_max(const Logits& logits, std::int64_t count) {
  if (logits.state == nullptr) {
    return arg_max(logits.raw, count);
  }
  Best best{-INFINITY, 0};
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) {
    const float logit = logits[i];
    best = logit > best.logit ? Best{logit, static_cast<std::int32_t>(i)} : best;
  }
  return block_best<kThreads>(best);
}

// What one token's draw is about.
struct Draw {
  Logits logits;
  std::int64_t count;
  double high;  // the largest logit
  double inv_temperature;

  __device__ double distance(float logit) const {
    return (high - static_cast<double>(logit)) * inv_temperature;
  }
  __device__ Mass weight(float logit) const {
    return __double2ull_rn(exp(-distance(logit)) * kWeightOne);
  }
};

__device__ __forceinline__ std::uint32_t key_of(float logit) {
  const std::uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 ties with 0
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

__device__ __forceinline__ float logit_of(std::uint32_t key) {
  return __uint_as_float((key & 0x80000000U) != 0 ? key & 0x7FFFFFFFU : ~key);
}

// Whether a logit has any probability: no NaN, no -inf.
__device__ __forceinline__ bool has_weight(float logit) { return logit > -INFINITY; }

struct Histograms {
  Mass top_mass[kTopBins];  // by the first digit, of all logits
  std::uint32_t top_count[kTopBins];
  Mass mass[kBins];  // by a later digit, of the logits that share the earlier ones
  std::uint32_t count[kBins];
};

// Adds up the logits whose key agrees with `prefix` above `shift` + `bits` by their digit there.
__device__ void fill(const Draw& draw, std::uint32_t prefix, int shift, int bits, Mass* mass,
                     std::uint32_t* count) {
  const int bins = 1 << bits;
  for (int bin = threadIdx.x; bin < bins; bin += kThreads) {
    mass[bin] = 0;
    count[bin] = 0;
  }
  __syncthreads();
  const int above = shift + bits;
  for (std::int64_t i = threadIdx.x; i < draw.count; i += kThreads) {
    const float logit = draw.logits[i];
    const std::uint32_t key = key_of(logit);
    if (has_weight(logit) && (above == 32 || (key >> above) == (prefix >> above))) {
      const std::uint32_t bin = key >> shift & (bins - 1);
      atomicAdd(&mass[bin], draw.weight(logit));
      atomicAdd(&count[bin], 1U);
    }
  }
  __syncthreads();
}

struct Found {
  int bin;
  Mass mass_above;  // of the bins above it
  Mass count_above;
};

// From the highest bin down, the bin where the running sum of masses (or counts) first exceeds
// `target`; the lowest bin in use if it never does.
__device__ Found find_bin(const Mass* mass, const std::uint32_t* count, int bins, bool by_count,
                          Mass target) {
  __shared__ Found found;
  if (threadIdx.x < kWarpSize) {
    const int per_lane = bins / kWarpSize;
    const int lane = threadIdx.x;
    const int highest = bins - 1 - lane * per_lane;  // lane 0 has the highest bins
    Mass own_mass = 0;
    Mass own_count = 0;
    for (int bin = highest; bin > highest - per_lane; --bin) {
      own_mass += mass[bin];
      own_count += count[bin];
    }
    Mass mass_above = 0;
    Mass count_above = 0;
    for (int other = 0; other < kWarpSize; ++other) {
      const Mass other_mass = __shfl_sync(kFullWarp, own_mass, other);
      const Mass other_count = __shfl_sync(kFullWarp, own_count, other);
      mass_above += other < lane ? other_mass : 0;
      count_above += other < lane ? other_count : 0;
    }
    const Mass before = by_count ? count_above : mass_above;
    const Mass own = by_count ? own_count : own_mass;
    const unsigned holders = __ballot_sync(kFullWarp, own > 0 && before + own > target);
    const unsigned in_use = __ballot_sync(kFullWarp, own_count > 0);
    const int holder = holders != 0 ? __ffs(holders) - 1 : kWarpSize - 1 - __clz(in_use);
    if (lane == holder) {
      Found here{highest, mass_above, count_above};
      Found last = here;
      for (int bin = highest; bin > highest - per_lane; --bin) {
        if (count[bin] > 0) {
          last = {bin, here.mass_above, here.count_above};
          const Mass sum = by_count ? here.count_above + count[bin] : here.mass_above + mass[bin];
          if (sum > target) {
            break;
          }
        }
        here.mass_above += mass[bin];
        here.count_above += count[bin];
      }
      found = last;
    }
  }
  __syncthreads();
  const Found result = found;
  __syncthreads();
  return result;
}

struct Place {
  std::uint32_t key;
  Mass mass_above;  // of all larger keys
  Mass remaining;   // target less what lies above, in masses or counts
};

// The key at which the running sum over the order first exceeds `target`.
__device__ Place locate(const Draw& draw, Histograms& histograms, bool by_count, Mass target) {
  Found found = find_bin(histograms.top_mass, histograms.top_count, kTopBins, by_count, target);
  Place place{static_cast<std::uint32_t>(found.bin) << 22, found.mass_above, target};
  place.remaining -= by_count ? found.count_above : found.mass_above;
  for (int shift = 11; shift >= 0; shift -= 11) {
    fill(draw, place.key, shift, 11, histograms.mass, histograms.count);
    found = find_bin(histograms.mass, histograms.count, kBins, by_count, place.remaining);
    place.key |= static_cast<std::uint32_t>(found.bin) << shift;
    place.mass_above += found.mass_above;
    place.remaining -= by_count ? found.count_above : found.mass_above;
  }
  return place;
}

// The id of the n-th logit (from 0, by id) whose key is `key`; the last one if there are fewer.
__device__ std::int32_t nth_id(const Draw& draw, std::uint32_t key, Mass n) {
  __shared__ std::uint32_t counts[kWarps];
  __shared__ std::int32_t id;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const std::int64_t stretch = (draw.count + kThreads - 1) / kThreads * kWarpSize;
  const std::int64_t begin = warp * stretch;
  const std::int64_t end = begin + stretch < draw.count ? begin + stretch : draw.count;
  const auto matches = [&](std::int64_t first) {
    const std::int64_t i = first + lane;
    const float logit = i < end ? draw.logits[i] : -INFINITY;
    const bool match = has_weight(logit) && key_of(logit) == key;
    return __ballot_sync(kFullWarp, match);
  };
  std::uint32_t own = 0;
  for (std::int64_t first = begin; first < end; first += kWarpSize) {
    own += __popc(matches(first));
  }
  if (lane == 0) {
    counts[warp] = own;
  }
  __syncthreads();
  Mass before = 0;
  Mass total = 0;
  for (int w = 0; w < kWarps; ++w) {
    before += w < warp ? counts[w] : 0;
    total += counts[w];
  }
  if (n >= total) {
    n = total - 1;
  }
  if (n >= before && n < before + own) {
    auto left = static_cast<std::uint32_t>(n - before);
    for (std::int64_t first = begin; first < end; first += kWarpSize) {
      unsigned found = matches(first);
      if (left < static_cast<std::uint32_t>(__popc(found))) {
        for (; left > 0; --left) {
          found &= found - 1;
        }
        if (lane == 0) {
          id = static_cast<std::int32_t>(first) + __ffs(found) - 1;
        }
        break;
      }
      left -= __popc(found);
    }
  }
  __syncthreads();
  const std::int32_t result = id;
  __syncthreads();
  return result;
}

// The first 24 bits of the stream's number at `index`: `stream_uniform` times 2^24.
__device__ std::uint32_t uniform_bits(std::uint64_t seed, std::uint64_t index) {
  const auto words =
      philox4x32({static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32), 0, 0},
                 {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
  return words[0] >> 8;
}

__device__ std::int32_t sample(const Logits& logits, std::int64_t count, const SlotState& state,
                               std::uint64_t index, Histograms& histograms) {
  const Best best = arg_max(logits, count);
  if (!(state.temperature > 0.0f) || state.top_k == 1 || !isfinite(best.logit)) {
    return best.id;
  }
  // Never 0, or the distance of a logit of -inf would be NaN at an infinite temperature.
  const Draw draw{logits, count, static_cast<double>(best.logit),
                  fmax(1.0 / static_cast<double>(state.temperature), 1e-300)};
  fill(draw, 0, 22, 10, histograms.top_mass, histograms.top_count);
  const Found all = find_bin(histograms.top_mass, histograms.top_count, kTopBins, false, ~Mass{0});
  Mass kept = all.mass_above + histograms.top_mass[all.bin];
  const Mass num_logits = all.count_above + histograms.top_count[all.bin];

  if (state.top_k > 0 && static_cast<Mass>(state.top_k) < num_logits) {
    const Place last = locate(draw, histograms, true, static_cast<Mass>(state.top_k) - 1);
    kept = last.mass_above + (last.remaining + 1) * draw.weight(logit_of(last.key));
  }
  if (state.top_p < 1.0f) {
    const double border = ceil(static_cast<double>(state.top_p) * static_cast<double>(kept));
    const Mass least = border > 1.0 ? __double2ull_rn(border) : 1;
    const Place last = locate(draw, histograms, false, (least < kept ? least : kept) - 1);
    const Mass weight = draw.weight(logit_of(last.key));
    kept = last.mass_above + (last.remaining / weight + 1) * weight;
  }
  if (state.min_p > 0.0f) {
    // min_p as a distance: exp(-distance) >= min_p.
    const double reach = fmax(0.0, -log(static_cast<double>(state.min_p)));
    Mass within = 0;
    for (std::int64_t i = threadIdx.x; i < count; i += kThreads) {
      const float logit = logits[i];
      if (has_weight(logit) && draw.distance(logit) <= reach) {
        within += draw.weight(logit);
      }
    }
    within = block_sum<kThreads>(within);
    kept = within < kept ? within : kept;
  }

  // floor(uniform * kept), then the first token whose running sum exceeds it.
  const Mass bits = uniform_bits(state.seed, index);
  const Mass target = __umul64hi(kept, bits) << 40 | (kept * bits) >> 24;
  const Place place = locate(draw, histograms, false, target);
  return nth_id(draw, place.key, place.remaining / draw.weight(logit_of(place.key)));
}

// The token of position `i` of a row that samples it: forced, or from the logits. Returns whether
// the row does; `token` is then set in every thread.
template <bool kGreedyOnly>
__device__ bool token_at(const SampleAccept& args, std::int64_t row, std::int64_t i,
                         Histograms* histograms, std::int32_t& token) {
  const std::int64_t slot = args.rows.slots[row];
  if (slot < 0) {
    return false;
  }
  const SlotState& state = args.table[slot];
  const std::int64_t start = args.sample_start[row];
  if (state.finish_reason != kNotFinished || start < 0 || i >= args.sample_len[row]) {
    return false;
  }
  const std::int64_t num_forced = args.forced == nullptr || state.forced_drafts != 0
                                      ? 0
                                      : min(std::int64_t{state.num_forced}, args.max_forced);
  const std::int64_t index = state.num_emitted + i;
  const float* logits = args.logits + (start + i) * args.vocab_size;
  if (index < num_forced) {
    token = args.forced[slot * args.max_forced + index];
  } else if constexpr (kGreedyOnly) {
    token = arg_max(logits, args.vocab_size).id;
  } else {
    token = sample(logits_at(args, state, slot, row, i, logits), args.vocab_size, state,
                   static_cast<std::uint64_t>(index), *histograms);
  }
  return true;
}

// One CTA per row and position. Leaves the sampled tokens in args.tokens for accept_kernel.
__global__ void __launch_bounds__(kThreads)
    greedy_kernel(const __grid_constant__ SampleAccept args, std::int64_t max_positions) {
  const std::int64_t row = blockIdx.x / max_positions;
  const std::int64_t i = blockIdx.x % max_positions;
  std::int32_t token = 0;
  if (token_at<true>(args, row, i, nullptr, token) && threadIdx.x == 0) {
    args.tokens[row * args.max_emitted + i] = token;
  }
}

__global__ void __launch_bounds__(kThreads)
    sample_kernel(const __grid_constant__ SampleAccept args, std::int64_t max_positions) {
  __shared__ Histograms histograms;
  const std::int64_t row = blockIdx.x / max_positions;
  const std::int64_t i = blockIdx.x % max_positions;
  std::int32_t token = 0;
  if (token_at<false>(args, row, i, &histograms, token) && threadIdx.x == 0) {
    args.tokens[row * args.max_emitted + i] = token;
  }
}

constexpr int kAcceptThreads = 128;

// One thread per row.
__global__ void __launch_bounds__(kAcceptThreads)
    accept_kernel(const __grid_constant__ SampleAccept args) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kAcceptThreads + threadIdx.x;
  if (row >= args.rows.num_rows) {
    return;
  }
  const std::int64_t slot = args.rows.slots[row];
  std::int32_t* tokens = args.tokens + row * args.max_emitted;
  std::int32_t emitted = 0;
  std::int32_t accepted = 0;
  std::int32_t reason = slot < 0 ? kNotFinished : args.table[slot].finish_reason;
  const std::int64_t len = slot < 0 || args.sample_start[row] < 0 || reason != kNotFinished
                               ? 0
                               : min(std::int64_t{args.sample_len[row]}, args.max_emitted);
  if (len > 0) {
    const SlotState& state = args.table[slot];
    const std::int32_t* drafts = args.token_ids + args.rows.row_start[row] + 1;
    while (accepted + 1 < len && drafts[accepted] == tokens[accepted]) {
      ++accepted;
    }
    emitted = min(accepted + 1, max(state.num_remaining, 0));
    reason = static_cast<std::int32_t>(emitted >= state.num_remaining ? FinishReason::kLength
                                                                      : FinishReason::kNotFinished);
    for (std::int32_t i = 0; i < emitted; ++i) {
      if (is_end_id(state, tokens[i])) {
        emitted = i + 1;
        reason = static_cast<std::int32_t>(FinishReason::kEndId);
      }
    }
  }
  for (std::int64_t i = emitted; i < args.max_emitted; ++i) {
    tokens[i] = -1;
  }
  args.num_emitted[row] = emitted;
  args.num_accepted[row] = accepted;
  args.finish_reason[row] = reason;
}

}  // namespace

void sample_accept(const SampleAccept& args, Stream stream) {
  if (args.vocab_size <= 0 || args.vocab_size > kMaxVocab) {
    throw std::invalid_argument("sample_accept: expected vocab_size in [1, 2^19], got " +
                                std::to_string(args.vocab_size));
  }
  if (args.rows.num_rows == 0) {
    return;
  }
  // A prefill row samples one position at most, a verify row one for each of its tokens.
  const std::int64_t max_positions =
      args.rows.max_row_tokens < args.max_emitted ? args.rows.max_row_tokens : args.max_emitted;
  if (max_positions > 0) {
    const unsigned grid = grid_x(args.rows.num_rows * max_positions, "sample_accept");
    if (args.greedy_only) {
      greedy_kernel<<<grid, kThreads, 0, cuda_stream(stream)>>>(args, max_positions);
    } else {
      sample_kernel<<<grid, kThreads, 0, cuda_stream(stream)>>>(args, max_positions);
    }
    check_cuda(cudaGetLastError(), "sample_accept");
  }
  const unsigned grid = grid_x(ceil_div(args.rows.num_rows, kAcceptThreads), "sample_accept");
  accept_kernel<<<grid, kAcceptThreads, 0, cuda_stream(stream)>>>(args);
  check_cuda(cudaGetLastError(), "sample_accept");
}

}  // namespace deltaflash::cuda
