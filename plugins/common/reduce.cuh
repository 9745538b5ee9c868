#pragma once

#include <cstdint>

namespace deltaflash {

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xFFFFFFFFU;

/// The sum over each group of kLanes neighbouring lanes, in a fixed order, in all of them: an
/// exchange adds the same two numbers on both sides.
template <int kLanes, typename T>
__device__ __forceinline__ T lanes_sum(T value) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, distance);
  }
  return value;
}

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
  return lanes_sum<kWarpSize>(value);
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}

/// The sum over the CTA, in a fixed order, in every thread. May be called again at once.
template <int kThreads, typename T>
__device__ __forceinline__ T block_sum(T value) {
  static_assert(kThreads % kWarpSize == 0 && kThreads <= 1024);
  constexpr int kWarps = kThreads / kWarpSize;
  __shared__ T partial[kWarps];
  value = warp_sum(value);
  if (threadIdx.x % kWarpSize == 0) {
    partial[threadIdx.x / kWarpSize] = value;
  }
  __syncthreads();
  T total = partial[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) {
    total += partial[warp];
  }
  __syncthreads();
  return total;
}

struct Best {
  float logit;
  std::int32_t id;
};

/// The larger logit, of equal ones the lower id. NaN never wins.
__device__ __forceinline__ void take_better(Best& best, Best other) {
  if (other.logit > best.logit || (other.logit == best.logit && other.id < best.id)) {
    best = other;
  }
}

/// The best over the CTA, in every thread. May be called again at once.
template <int kThreads>
__device__ __forceinline__ Best block_best(Best best) {
  static_assert(kThreads % kWarpSize == 0 && kThreads <= 1024);
  constexpr int kWarps = kThreads / kWarpSize;
  __shared__ Best of_warps[kWarps];
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    take_better(best, {__shfl_xor_sync(kFullWarp, best.logit, distance),
                       __shfl_xor_sync(kFullWarp, best.id, distance)});
  }
  if (threadIdx.x % kWarpSize == 0) {
    of_warps[threadIdx.x / kWarpSize] = best;
  }
  __syncthreads();
  best = of_warps[0];
  for (int warp = 1; warp < kWarps; ++warp) {
    take_better(best, of_warps[warp]);
  }
  __syncthreads();
  return best;
}

}  // namespace deltaflash
