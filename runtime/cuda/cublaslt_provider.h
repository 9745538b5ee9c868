#pragma once

#include <cstdint>
#include <memory>

#include "runtime/cuda/arena.h"
#include "runtime/src/device.h"

namespace deltaflash::cuda {

/// Segments by cuBLASLt: activations are rounded to BF16, BF16 weights, fp32 sums and outputs. Its
/// workspace and the rounded activations of up to `max_tokens` rows are taken from `arena`;
/// segments must be launched on one stream, which alone uses them.
std::unique_ptr<SegmentProvider> make_cublaslt_provider(Arena& arena, std::int64_t max_tokens);

}  // namespace deltaflash::cuda
