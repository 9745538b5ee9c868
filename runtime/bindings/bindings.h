#pragma once

#include <nanobind/nanobind.h>

namespace deltaflash {

// One function a source file of this folder; each adds its part to `runtime._native`. Ops live in
// the submodule `runtime._native.plugins`, which is what their function is given.

void bind_errors(nanobind::module_& module);
void bind_executor(nanobind::module_& module);
void bind_image(nanobind::module_& module);
void bind_text(nanobind::module_& module);

void bind_bias_activation(nanobind::module_& plugins);
void bind_bias_residual(nanobind::module_& plugins);
void bind_causal_conv(nanobind::module_& plugins);
void bind_commit(nanobind::module_& plugins);
void bind_embedding(nanobind::module_& plugins);
void bind_gated_attention(nanobind::module_& plugins);
void bind_gated_delta_net(nanobind::module_& plugins);
void bind_gated_rms_norm(nanobind::module_& plugins);
void bind_gather_rows(nanobind::module_& plugins);
void bind_layer_norm(nanobind::module_& plugins);
void bind_linear(nanobind::module_& plugins);
void bind_patchify(nanobind::module_& plugins);
void bind_rms_norm(nanobind::module_& plugins);
void bind_rotary_kv_write(nanobind::module_& plugins);
void bind_round_metadata(nanobind::module_& plugins);
void bind_sampling(nanobind::module_& plugins);
void bind_scripted_draft(nanobind::module_& plugins);
void bind_silu_mul(nanobind::module_& plugins);
void bind_slot_table(nanobind::module_& plugins);
void bind_thread_pool(nanobind::module_& plugins);
void bind_token_logprobs(nanobind::module_& plugins);
void bind_vision_attention(nanobind::module_& plugins);
void bind_vision_position_embedding(nanobind::module_& plugins);
void bind_vision_rotary(nanobind::module_& plugins);

}  // namespace deltaflash
