#include "plugins/common/cuda_error.h"
#include "plugins/common/cuda_launch.h"
#include "plugins/common/row_batch.cuh"
#include "plugins/scripted_draft/scripted_draft.h"

namespace deltaflash::cuda {
namespace {

constexpr int kThreads = 128;

// One thread per token; those that begin a row or belong to none leave at once.
__global__ void __launch_bounds__(kThreads)
    scripted_draft_kernel(const __grid_constant__ ScriptedDraft args) {
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t row = row_of_token(args.rows.row_start, args.rows.num_rows, token);
  const std::int64_t slot = row < 0 ? -1 : args.rows.slots[row];
  if (slot < 0 || token == args.rows.row_start[row]) {
    return;
  }
  const SlotState& state = args.table[slot];
  const std::int64_t num_script = min(std::int64_t{state.num_script}, args.max_forced);
  if (num_script <= 0) {
    return;
  }
  const std::int64_t num_forced = min(std::int64_t{state.num_forced}, args.max_forced);
  const std::int64_t right = args.script[slot * args.max_forced + state.num_rounds % num_script];
  const std::int64_t i = token - args.rows.row_start[row] - 1;
  const std::int64_t index = state.num_emitted + i;
  const std::int64_t id = index < num_forced ? args.forced[slot * args.max_forced + index] : 0;
  args.token_ids[token] = static_cast<std::int32_t>(i < right ? id : (id + 1) % args.vocab_size);
}

}  // namespace

void scripted_draft(const ScriptedDraft& args, Stream stream) {
  require_positive(args.vocab_size, "scripted_draft", "vocab_size");
  if (args.rows.num_rows == 0 || args.rows.num_tokens == 0) {
    return;
  }
  const unsigned grid = grid_x(ceil_div(args.rows.num_tokens, kThreads), "scripted_draft");
  scripted_draft_kernel<<<grid, kThreads, 0, cuda_stream(stream)>>>(args);
  check_cuda(cudaGetLastError(), "scripted_draft");
}

}  // namespace deltaflash::cuda
