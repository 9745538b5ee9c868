#include "plugins/common/cuda_error.h"
#include "plugins/common/cuda_launch.h"
#include "plugins/gather_rows/gather_rows.h"

namespace deltaflash::cuda {
namespace {

constexpr int kThreads = 256;

// One CTA per gathered row, copied in units of T.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(const T* __restrict__ x, const std::int32_t* __restrict__ index,
                       T* __restrict__ out, std::int64_t row_units) {
  const std::int64_t row = blockIdx.x;
  const T* from = x + static_cast<std::int64_t>(index[row]) * row_units;
  T* to = out + row * row_units;
  for (std::int64_t i = threadIdx.x; i < row_units; i += kThreads) {
    to[i] = from[i];
  }
}

template <typename T>
void gather_as(const GatherRows& args, std::int64_t row_bytes, Stream stream) {
  gather_rows_kernel<T><<<grid_x(args.num_out, "gather_rows"), kThreads, 0, cuda_stream(stream)>>>(
      static_cast<const T*>(args.x), args.index, static_cast<T*>(args.out),
      row_bytes / static_cast<std::int64_t>(sizeof(T)));
}

}  // namespace

void gather_rows(const GatherRows& args, Stream stream) {
  require_positive(args.dim, "gather_rows", "dim");
  if (args.num_out == 0) {
    return;
  }
  const std::int64_t row_bytes = args.dim * static_cast<std::int64_t>(size_of(args.dtype));
  if (row_bytes % 16 == 0) {
    gather_as<uint4>(args, row_bytes, stream);
  } else if (row_bytes % 4 == 0) {
    gather_as<std::uint32_t>(args, row_bytes, stream);
  } else {
    gather_as<std::uint16_t>(args, row_bytes, stream);
  }
  check_cuda(cudaGetLastError(), "gather_rows");
}

}  // namespace deltaflash::cuda
