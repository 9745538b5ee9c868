#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "plugins/bias_residual/bias_residual.h"
#include "plugins/common/simd.h"
#include "plugins/common/thread_pool.h"

namespace deltaflash::cpu {
namespace {

constexpr std::int64_t kGrain = 32 * 1024;  // elements below which a second thread costs more

DELTAFLASH_SIMD void add_row(const float* y, const float* bias, float* residual, std::int64_t dim) {
  for (std::int64_t i = 0; i < dim; ++i) {
    residual[i] += y[i] + bias[i];
  }
}

}  // namespace

void bias_residual(const BiasResidual& args, Stream stream) {
  if (args.num_rows < 0 || args.dim <= 0) {
    throw std::invalid_argument("bias_residual: expected num_rows >= 0 and dim > 0, got " +
                                std::to_string(args.num_rows) + " and " + std::to_string(args.dim));
  }
  const std::int64_t dim = args.dim;
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / dim);
  parallel_for(stream, args.num_rows, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      add_row(args.y + row * dim, args.bias, args.residual + row * dim, dim);
    }
  });
}

}  // namespace deltaflash::cpu
