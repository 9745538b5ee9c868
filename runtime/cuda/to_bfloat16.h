#pragma once

#include <cstdint>

#include "plugins/common/dtype.h"
#include "plugins/common/stream.h"

namespace deltaflash::cuda {

/// out[i] = x[i], rounded to nearest even. Both 16-byte aligned. Enqueues on `stream`, does not
/// synchronise. Throws CudaError for a refused launch.
void to_bfloat16(const float* x, BFloat16* out, std::int64_t count, Stream stream);

}  // namespace deltaflash::cuda
