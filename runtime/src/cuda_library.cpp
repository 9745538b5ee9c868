#include "runtime/src/cuda_library.h"

#include <dlfcn.h>

#include <filesystem>
#include <string>

#include "plugins/common/error.h"

namespace deltaflash {
namespace {

constexpr const char* kLibrary = "libdeltaflash_cuda.so";

/// The folder of the file that holds this function: the native module.
std::filesystem::path own_folder() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&own_folder), &info) == 0) {
    return {};
  }
  return std::filesystem::path(info.dli_fname).parent_path();
}

}  // namespace

std::unique_ptr<Device> open_cuda_device(const CudaOptions& options) {
  const std::filesystem::path path = own_folder() / kLibrary;
  // Never closed: the driver does not like its users to vanish, and the code is needed to the end.
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    // glibc keeps this text per thread.
    const char* reason = ::dlerror();  // NOLINT(concurrency-mt-unsafe)
    throw EngineError("device cuda: found no usable " + path.string() + " (" +
                      std::string(reason != nullptr ? reason : "no reason given") +
                      "), needed a build with nvcc; fix: make setup CUDA=1 in the checkout, or use "
                      "device cpu");
  }
  const auto make = reinterpret_cast<MakeCudaDevice>(::dlsym(library, kMakeCudaDevice));
  if (make == nullptr) {
    throw EngineError("device cuda: " + path.string() + " has no " + kMakeCudaDevice +
                      ", needed the library of this build");
  }
  return std::unique_ptr<Device>(make(&options));
}

}  // namespace deltaflash
