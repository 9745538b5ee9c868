#include <cstdint>

#include "plugins/common/cuda_error.h"
#include "plugins/common/cuda_launch.h"
#include "plugins/common/reduce.cuh"
#include "plugins/token_logprobs/token_logprobs.h"

namespace deltaflash::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kRun = 8;  // terms that a thread adds in fp32
constexpr std::int64_t kMaxVocab = std::int64_t{1} << 30;
constexpr std::int32_t kNobody = kMaxVocab;  // an id behind all others

// NaN counts as -inf, and -inf is like any number here: the lowest ids of it fill up a list.
__device__ __forceinline__ float number(float logit) {
  return logit > -INFINITY ? logit : -INFINITY;
}

__device__ __forceinline__ bool comes_after(Best entry, Best other) {
  return entry.logit < other.logit || (entry.logit == other.logit && entry.id > other.id);
}

// The two likeliest of a thread's logits, ids threadIdx.x modulo kThreads. The list of the CTA is
// made by merging: a thread looks at its logits again only when both have gone into the list.
struct OwnBest {
  Best first{-INFINITY, kNobody};
  Best second{-INFINITY, kNobody};

  __device__ void offer(Best entry) {
    if (comes_after(first, entry)) {
      second = first;
      first = entry;
    } else if (comes_after(second, entry)) {
      second = entry;
    }
  }

  // Of the logits that come after `last`.
  __device__ void find(const float* __restrict__ logits, std::int64_t count, Best last) {
    *this = {};
    for (std::int64_t i = threadIdx.x; i < count; i += kThreads) {
      const Best entry{number(logits[i]), static_cast<std::int32_t>(i)};
      if (comes_after(entry, last)) {
        offer(entry);
      }
    }
  }

  __device__ void take_first(const float* __restrict__ logits, std::int64_t count) {
    const Best last = first;
    if (second.id != kNobody) {
      first = second;
      second = {-INFINITY, kNobody};
    } else {
      find(logits, count, last);
    }
  }
};

struct Sums {
  double mass;    // of exp(l - high), or how many are +inf where high is
  int num_above;  // logits above the token's
};

__device__ Sums sums_of(const float* __restrict__ logits, std::int64_t count, float high,
                        float logit) {
  double mass = 0.0;
  int num_above = 0;
  for (std::int64_t first = threadIdx.x; first < count; first += kThreads * kRun) {
    float run = 0.0f;
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const std::int64_t i = first + std::int64_t{kThreads} * j;
      if (i < count) {
        const float v = number(logits[i]);
        run += v == high ? 1.0f : expf(v - high);  // inf - inf would be NaN
        num_above += v > logit ? 1 : 0;
      }
    }
    mass += static_cast<double>(run);
  }
  return {block_sum<kThreads>(mass), block_sum<kThreads>(num_above)};
}

// One CTA per row and position.
__global__ void __launch_bounds__(kThreads)
    token_logprobs_kernel(const __grid_constant__ TokenLogprobs args, std::int64_t max_positions) {
  const std::int64_t row = blockIdx.x / max_positions;
  const std::int64_t i = blockIdx.x % max_positions;
  const std::int64_t k = num_candidates(args, row, i);
  if (k < 0) {
    return;
  }
  const float* logits = args.logits + (args.sample_start[row] + i) * args.vocab_size;
  const std::int64_t at = row * args.max_emitted + i;

  OwnBest own;
  own.find(logits, args.vocab_size, {INFINITY, -1});
  const Best best = block_best<kThreads>(own.first);
  const float high = best.logit;
  const float logit = number(logits[args.tokens[at]]);
  Sums sums{1.0, 0};
  if (high > -INFINITY) {
    sums = sums_of(logits, args.vocab_size, high, logit);
  }
  const double log_sum = log(sums.mass);
  if (threadIdx.x == 0) {
    args.logprob[at] = logprob_of(logit, high, log_sum);
    args.rank[at] = 1 + sums.num_above;
  }
  Best next = best;
  for (std::int64_t j = 0; j < k; ++j) {
    if (threadIdx.x == 0) {
      args.top_ids[at * kMaxTopLogprobs + j] = next.id;
      args.top_logprobs[at * kMaxTopLogprobs + j] = logprob_of(next.logit, high, log_sum);
    }
    if (j + 1 < k) {
      if (own.first.id == next.id) {
        own.take_first(logits, args.vocab_size);
      }
      next = block_best<kThreads>(own.first);
    }
  }
}

}  // namespace

void token_logprobs(const TokenLogprobs& args, Stream stream) {
  if (args.vocab_size <= 0 || args.vocab_size > kMaxVocab) {
    throw std::invalid_argument("token_logprobs: expected vocab_size in [1, 2^30], got " +
                                std::to_string(args.vocab_size));
  }
  // A prefill row emits one token at most, a verify row one for each of its tokens.
  const std::int64_t max_positions = std::min(args.rows.max_row_tokens, args.max_emitted);
  if (args.rows.num_rows == 0 || max_positions <= 0) {
    return;
  }
  const unsigned grid = grid_x(args.rows.num_rows * max_positions, "token_logprobs");
  token_logprobs_kernel<<<grid, kThreads, 0, cuda_stream(stream)>>>(args, max_positions);
  check_cuda(cudaGetLastError(), "token_logprobs");
}

}  // namespace deltaflash::cuda
