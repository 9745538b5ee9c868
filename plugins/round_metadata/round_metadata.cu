#include "plugins/common/cuda_error.h"
#include "plugins/common/cuda_launch.h"
#include "plugins/common/reduce.cuh"
#include "plugins/common/row_batch.cuh"
#include "plugins/round_metadata/round_metadata.h"

namespace deltaflash::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpSize;

// The sum of `value` over this thread and those before it; `total` over all of them.
__device__ std::int32_t inclusive_scan(std::int32_t value, std::int32_t& total) {
  __shared__ std::int32_t warp_totals[kWarps];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const std::int32_t below = __shfl_up_sync(kFullWarp, value, distance);
    value += lane >= distance ? below : 0;
  }
  if (lane == kWarpSize - 1) {
    warp_totals[warp] = value;
  }
  __syncthreads();
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    value += w < warp ? warp_totals[w] : 0;
    total += warp_totals[w];
  }
  __syncthreads();
  return value;
}

// One CTA. row_slots and row_len may lie in pinned host memory: each is read once.
__global__ void __launch_bounds__(kThreads)
    round_metadata_kernel(const __grid_constant__ RoundMetadata args) {
  if (threadIdx.x == 0) {
    args.row_start[0] = 0;
  }
  std::int32_t before = 0;  // tokens of the rows that earlier passes dealt with
  for (std::int64_t first = 0; first < args.num_rows; first += kThreads) {
    const std::int64_t row = first + threadIdx.x;
    const bool in_use = row < args.num_rows;
    const std::int32_t length = in_use ? args.row_len[row] : 0;
    std::int32_t total = 0;
    const std::int32_t end = before + inclusive_scan(length, total);
    if (in_use) {
      const std::int32_t slot = args.row_slots[row];
      args.slots[row] = slot;
      args.row_start[row + 1] = end;
      args.sample_start[row] = slot < 0 ? -1 : end - length;
      args.sample_len[row] = slot < 0 ? 0 : length;
    }
    before += total;
  }
  __syncthreads();  // row_start and slots are read by other threads below
  for (std::int64_t token = threadIdx.x; token < args.num_tokens; token += kThreads) {
    const std::int64_t row = row_of_token(args.row_start, args.num_rows, token);
    const std::int64_t slot = row < 0 ? -1 : args.slots[row];
    std::int32_t position = 0;
    std::int32_t id = 0;
    bool is_draft = false;
    if (slot >= 0) {
      const SlotState& state = args.table[slot];
      const auto i = static_cast<std::int32_t>(token - args.row_start[row]);
      position = state.kv_len + i + state.rope_delta;
      id = state.last_token;
      is_draft = i > 0;
    }
    if (!is_draft) {
      args.token_ids[token] = id;
    }
    for (int axis = 0; axis < 3; ++axis) {
      args.positions[axis * args.num_tokens + token] = position;
    }
  }
}

}  // namespace

void round_metadata(const RoundMetadata& args, Stream stream) {
  round_metadata_kernel<<<1, kThreads, 0, cuda_stream(stream)>>>(args);
  check_cuda(cudaGetLastError(), "round_metadata");
}

}  // namespace deltaflash::cuda
