#include <nanobind/nanobind.h>

#include "runtime/bindings/bindings.h"

NB_MODULE(_native, module) {
  module.doc() = "The C++ half of the runtime: executor, text handling and the CPU ops.";
  deltaflash::bind_errors(module);
  deltaflash::bind_text(module);
  nanobind::module_ plugins = module.def_submodule("plugins", "The CPU twins of the ops.");
}
