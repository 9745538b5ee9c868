#include <nanobind/nanobind.h>

#include "runtime/bindings/bindings.h"

NB_MODULE(_native, module) {
  module.doc() = "The C++ half of the runtime: executor, text handling and the CPU ops.";
  deltaflash::bind_plugins(module);
  deltaflash::bind_text(module);
}
