#pragma once

#include <memory>

#include "runtime/src/device.h"

namespace deltaflash::cuda {

/// Segments by `cuda::linear`: fp32 activations, BF16 weights, and a row's result does not depend
/// on the other rows.
std::unique_ptr<SegmentProvider> make_exact_provider();

}  // namespace deltaflash::cuda
