#include <algorithm>
#include <stdexcept>
#include <string>

#include "plugins/common/simd.h"
#include "plugins/common/thread_pool.h"
#include "plugins/silu_mul/silu_mul.h"

namespace deltaflash::cpu {
namespace {

using simd::Lanes;

constexpr std::int64_t kGrain = 4 * 1024;  // elements below which a second thread costs more

DELTAFLASH_SIMD void silu_mul_row(const float* gate, const float* up, float* out,
                                  std::int64_t dim) {
  std::int64_t i = 0;
  for (; i + 16 <= dim; i += 16) {
    const Lanes g = simd::load(gate + i);
    simd::store(out + i, simd::silu(g) * simd::load(up + i));
  }
  const Lanes g = simd::load(gate + i, dim - i);
  simd::store(out + i, simd::silu(g) * simd::load(up + i, dim - i), dim - i);
}

}  // namespace

void silu_mul(const SiluMul& args, Stream stream) {
  if (args.dtype != DType::kFloat32) {
    throw std::invalid_argument("silu_mul: expected dtype float32, got " +
                                std::string(name_of(args.dtype)));
  }
  if (args.dim <= 0) {
    throw std::invalid_argument("silu_mul: expected dim > 0, got " + std::to_string(args.dim));
  }
  const auto* gate_up = static_cast<const float*>(args.gate_up);
  auto* out = static_cast<float*>(args.out);
  const std::int64_t dim = args.dim;
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / dim);
  parallel_for(stream, args.num_tokens, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t token = begin; token < end; ++token) {
      const float* gate = gate_up + token * 2 * dim;
      silu_mul_row(gate, gate + dim, out + token * dim, dim);
    }
  });
}

}  // namespace deltaflash::cpu
