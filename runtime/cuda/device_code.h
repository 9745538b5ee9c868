#pragma once

namespace deltaflash::cuda {

/// Whether this library holds code that the current GPU can run. Throws CudaError where the
/// question itself fails.
bool has_device_code();

}  // namespace deltaflash::cuda
