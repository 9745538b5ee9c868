#include <nanobind/nanobind.h>

#include "runtime/bindings/bindings.h"

NB_MODULE(_native, module) {
  module.doc() = "The C++ half of the runtime: executor, text handling and the CPU ops.";
  // A request that a module or a test holds until the interpreter ends is no leak.
  nanobind::set_leak_warnings(false);
  deltaflash::bind_errors(module);
  deltaflash::bind_text(module);
  deltaflash::bind_image(module);
  deltaflash::bind_executor(module);
  nanobind::module_ plugins = module.def_submodule("plugins", "The CPU twins of the ops.");
  deltaflash::bind_thread_pool(plugins);
  deltaflash::bind_token_logprobs(plugins);
  deltaflash::bind_slot_table(plugins);
  deltaflash::bind_bias_activation(plugins);
  deltaflash::bind_bias_residual(plugins);
  deltaflash::bind_causal_conv(plugins);
  deltaflash::bind_commit(plugins);
  deltaflash::bind_embedding(plugins);
  deltaflash::bind_gated_attention(plugins);
  deltaflash::bind_gated_delta_net(plugins);
  deltaflash::bind_gated_rms_norm(plugins);
  deltaflash::bind_gather_rows(plugins);
  deltaflash::bind_layer_norm(plugins);
  deltaflash::bind_linear(plugins);
  deltaflash::bind_patchify(plugins);
  deltaflash::bind_rms_norm(plugins);
  deltaflash::bind_rotary_kv_write(plugins);
  deltaflash::bind_round_metadata(plugins);
  deltaflash::bind_sampling(plugins);
  deltaflash::bind_scripted_draft(plugins);
  deltaflash::bind_silu_mul(plugins);
  deltaflash::bind_vision_attention(plugins);
  deltaflash::bind_vision_position_embedding(plugins);
  deltaflash::bind_vision_rotary(plugins);
}
