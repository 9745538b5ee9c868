#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "plugins/common/thread_pool.h"
#include "plugins/gather_rows/gather_rows.h"

namespace deltaflash::cpu {
namespace {

constexpr std::int64_t kGrainBytes = 64 * 1024;  // below this a second thread costs more

}  // namespace

void gather_rows(const GatherRows& args, Stream stream) {
  if (args.dim <= 0) {
    throw std::invalid_argument("gather_rows: expected dim > 0, got " + std::to_string(args.dim));
  }
  const auto* x = static_cast<const std::byte*>(args.x);
  auto* out = static_cast<std::byte*>(args.out);
  const std::int64_t row_bytes = args.dim * static_cast<std::int64_t>(size_of(args.dtype));
  const std::int64_t grain = std::max<std::int64_t>(1, kGrainBytes / row_bytes);
  parallel_for(stream, args.num_out, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      std::memcpy(out + i * row_bytes, x + args.index[i] * row_bytes,
                  static_cast<std::size_t>(row_bytes));
    }
  });
}

}  // namespace deltaflash::cpu
