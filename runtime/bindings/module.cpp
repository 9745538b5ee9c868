#include <nanobind/nanobind.h>

#include "runtime/bindings/bindings.h"

NB_MODULE(_native, module) {
  module.doc() = "The C++ half of the runtime: executor, text handling and the CPU ops.";
  nanobind::module_ plugins = module.def_submodule("plugins", "The CPU twins of the ops.");
  deltaflash::bind_thread_pool(plugins);
  deltaflash::bind_slot_table(plugins);
  deltaflash::bind_causal_conv(plugins);
  deltaflash::bind_gated_delta_net(plugins);
  deltaflash::bind_gated_rms_norm(plugins);
  deltaflash::bind_linear(plugins);
}
