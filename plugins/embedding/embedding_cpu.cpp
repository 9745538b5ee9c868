#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

#include "plugins/common/simd.h"
#include "plugins/common/thread_pool.h"
#include "plugins/embedding/embedding.h"

namespace deltaflash::cpu {
namespace {

constexpr std::int64_t kGrain = 16 * 1024;  // elements below which a second thread costs more

DELTAFLASH_SIMD void widen(const BFloat16* __restrict__ from, float* __restrict__ to,
                           std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    to[i] = std::bit_cast<float>(static_cast<std::uint32_t>(from[i].bits) << 16);
  }
}

}  // namespace

void embedding(const Embedding& args, Stream stream) {
  if (args.dtype != DType::kFloat32) {
    throw std::invalid_argument("embedding: expected dtype float32, got " +
                                std::string(name_of(args.dtype)));
  }
  if (args.hidden <= 0) {
    throw std::invalid_argument("embedding: expected hidden > 0, got " +
                                std::to_string(args.hidden));
  }
  auto* out = static_cast<float*>(args.out);
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / args.hidden);
  parallel_for(stream, args.num_tokens, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t token = begin; token < end; ++token) {
      const std::int64_t id = args.ids[token];
      float* row = out + token * args.hidden;
      if (id < 0 || id >= args.vocab_size) {
        std::fill_n(row, args.hidden, 0.0f);
      } else {
        widen(args.table + id * args.hidden, row, args.hidden);
      }
    }
  });
}

}  // namespace deltaflash::cpu
