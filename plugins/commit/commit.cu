#include <bit>

#include "plugins/commit/commit.h"
#include "plugins/common/cuda_error.h"
#include "plugins/common/cuda_launch.h"

namespace deltaflash::cuda {
namespace {

constexpr int kThreads = 128;

// One thread per row.
__global__ void __launch_bounds__(kThreads)
    commit_round_kernel(const __grid_constant__ CommitRound args) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row < args.rows.num_rows) {
    commit_row(args, row);
  }
}

}  // namespace

void commit_round(const CommitRound& args, Stream stream) {
  if (args.ring_rows <= 0 || !std::has_single_bit(static_cast<std::uint64_t>(args.ring_rows))) {
    throw std::invalid_argument("commit_round: expected ring_rows to be a power of two, got " +
                                std::to_string(args.ring_rows));
  }
  if (args.rows.num_rows == 0) {
    return;
  }
  const unsigned grid = grid_x(ceil_div(args.rows.num_rows, kThreads), "commit_round");
  commit_round_kernel<<<grid, kThreads, 0, cuda_stream(stream)>>>(args);
  check_cuda(cudaGetLastError(), "commit_round");
}

}  // namespace deltaflash::cuda
