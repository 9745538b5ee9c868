#include "runtime/src/operators.h"

#include <array>
#include <cmath>

#include "plugins/common/error.h"
#include "runtime/src/op_binder.h"

namespace deltaflash {
namespace {

/// A row count for buffers of either kind.
std::int64_t rows_in(const Buffer& buffer, const StepShape& shape) {
  return buffer.spec.rows == RowKind::kTokens ? shape.num_tokens : shape.num_logits;
}

const float* column(const Buffer& buffer, std::int64_t offset) {
  return static_cast<const float*>(buffer.data) + offset;
}

PagedKv paged_kv(const ModelMemory& memory, std::int64_t layer) {
  const KvLayer& pool = memory.kv_layers[static_cast<std::size_t>(layer)];
  return {.keys = pool.keys,
          .values = pool.values,
          .page_table = memory.slot.page_table,
          .max_pages = memory.slot.max_pages,
          .page_size = memory.page_size,
          .num_kv_heads = memory.config.num_kv_heads,
          .head_dim = memory.config.head_dim,
          .dtype = DType::kFloat32};
}

Operator bind_segment(const OpSpec& op, const ModelMemory& memory) {
  const OpBinder bind(op, memory);
  const auto found = memory.segments.find(op.segment);
  if (found == memory.segments.end()) {
    bind.fail("is not among the program's segments");
  }
  const auto& [spec, run] = found->second;
  Segment* segment = run.get();
  const RowKind rows = bind.any_buffer("out").spec.rows;
  const Buffer& out = bind.buffer("out", spec.out_dim, rows);
  // In verify every token has its logits, so the head reads rows of tokens there.
  const Buffer& x = bind.buffer("x", spec.in_dim,
                                rows == RowKind::kLogits ? bind.any_buffer("x").spec.rows : rows);
  return [segment, x, out](const StepShape& shape, Stream stream) {
    const std::array<const void*, 1> inputs{x.data};
    const std::array<void*, 1> outputs{out.data};
    segment->launch(stream, rows_in(out, shape), inputs, outputs);
  };
}

Operator bind_embedding(const OpBinder& bind, const ModelMemory& memory,
                        const PluginTable& plugins) {
  const ModelConfig& config = memory.config;
  const Buffer& out = bind.buffer("out", config.hidden_size);
  const Embedding args{.ids = memory.step.token_ids,
                       .table = bind.weight<BFloat16>("table", DType::kBFloat16,
                                                      {config.vocab_size, config.hidden_size}),
                       .out = out.data,
                       .num_tokens = 0,
                       .vocab_size = config.vocab_size,
                       .hidden = config.hidden_size,
                       .dtype = out.spec.dtype};
  return [args, run = plugins.embedding](const StepShape& shape, Stream stream) {
    Embedding step = args;
    step.num_tokens = shape.num_tokens;
    run(step, stream);
  };
}

Operator bind_image_rows(const OpBinder& bind, const ModelMemory& memory, Device& device) {
  const std::int64_t width = memory.config.hidden_size;
  auto* x = static_cast<float*>(bind.buffer("x", width).data);
  return [x, width, &memory, &device](const StepShape& /*shape*/, Stream /*stream*/) {
    for (const ImageRows& rows : memory.image_rows) {
      device.upload(x + rows.first_token * width, rows.values,
                    static_cast<std::size_t>(rows.num_tokens * width) * sizeof(float));
    }
  };
}

Operator bind_rms_norm(const OpBinder& bind, const ModelMemory& memory,
                       const PluginTable& plugins) {
  const ModelConfig& config = memory.config;
  const RowKind rows = bind.any_buffer("x").spec.rows;
  const Buffer& x = bind.buffer("x", config.hidden_size, rows);
  const Buffer& out = bind.buffer("out", config.hidden_size, rows);
  const RmsNorm args{.x = x.data,
                     .residual = bind.has_buffer("residual")
                                     ? bind.buffer("residual", config.hidden_size, rows).data
                                     : nullptr,
                     .weight = bind.weight<float>("weight", DType::kFloat32, {config.hidden_size}),
                     .out = out.data,
                     .num_tokens = 0,
                     .dim = config.hidden_size,
                     .eps = config.rms_norm_eps,
                     .unit_offset = bind.attr("unit_offset", 2) == 1,
                     .dtype = x.spec.dtype};
  return [args, x, run = plugins.rms_norm](const StepShape& shape, Stream stream) {
    RmsNorm step = args;
    step.num_tokens = rows_in(x, shape);
    run(step, stream);
  };
}

Operator bind_causal_conv(const OpBinder& bind, const ModelMemory& memory,
                          const PluginTable& plugins) {
  const ModelConfig& config = memory.config;
  const Buffer& x = bind.wide_buffer("x", config.conv_channels());
  const std::int64_t layer = bind.attr("gdn_layer", config.num_gdn_layers);
  const CausalConv args{.x = x.data,
                        .x_stride = x.spec.width,
                        .weight = bind.weight<float>("weight", DType::kFloat32,
                                                     {config.conv_channels(), config.conv_kernel}),
                        .ring = memory.gdn_layers[static_cast<std::size_t>(layer)].conv_ring,
                        .out = bind.buffer("out", config.conv_channels()).data,
                        .table = memory.slot.table,
                        .rows = {},
                        .channels = config.conv_channels(),
                        .kernel = config.conv_kernel,
                        .ring_cols = memory.conv_ring_cols,
                        .dtype = x.spec.dtype};
  return [args, &memory, run = plugins.causal_conv](const StepShape& shape, Stream stream) {
    CausalConv step = args;
    step.rows = rows_of(shape, memory.step);
    run(step, stream);
  };
}

Operator bind_gated_delta_net(const OpBinder& bind, const ModelMemory& memory,
                              void (*run)(const GatedDeltaNet&, Stream)) {
  const ModelConfig& config = memory.config;
  const Buffer& qkv = bind.buffer("qkv", config.conv_channels());
  const Buffer& ba = bind.buffer("ba", 2 * config.num_value_heads);
  const std::int64_t layer = bind.attr("gdn_layer", config.num_gdn_layers);
  const GdnLayer& pool = memory.gdn_layers[static_cast<std::size_t>(layer)];
  const GatedDeltaNet args{
      .qkv = qkv.data,
      .qkv_stride = qkv.spec.width,
      .ba = ba.data,
      .ba_stride = ba.spec.width,
      .a_log = bind.weight<float>("a_log", DType::kFloat32, {config.num_value_heads}),
      .dt_bias = bind.weight<float>("dt_bias", DType::kFloat32, {config.num_value_heads}),
      .state = pool.state,
      .ring_d = pool.ring_d,
      .ring_k = pool.ring_k,
      .ring_g = pool.ring_g,
      .out = bind.buffer("out", config.num_value_heads * config.value_dim).data,
      .table = memory.slot.table,
      .rows = {},
      .num_key_heads = config.num_key_heads,
      .num_value_heads = config.num_value_heads,
      .key_dim = config.key_dim,
      .value_dim = config.value_dim,
      .ring_rows = memory.ring_rows,
      .history_limit = memory.history_limit,
      .dtype = qkv.spec.dtype,
      .ring_dtype = DType::kFloat32};
  return [args, &memory, run](const StepShape& shape, Stream stream) {
    GatedDeltaNet step = args;
    step.rows = rows_of(shape, memory.step);
    run(step, stream);
  };
}

Operator bind_gated_rms_norm(const OpBinder& bind, const ModelMemory& memory,
                             const PluginTable& plugins) {
  const ModelConfig& config = memory.config;
  const std::int64_t width = config.num_value_heads * config.value_dim;
  const Buffer& x = bind.buffer("x", width);
  const Buffer& z = bind.wide_buffer("z", width);
  const std::int64_t offset = bind.attr("z_offset", z.spec.width - width + 1);
  const GatedRmsNorm args{
      .x = x.data,
      .z = column(z, offset),
      .z_stride = z.spec.width,
      .weight = bind.weight<float>("weight", DType::kFloat32, {config.value_dim}),
      .out = bind.buffer("out", width).data,
      .num_tokens = 0,
      .num_heads = config.num_value_heads,
      .head_dim = config.value_dim,
      .eps = config.rms_norm_eps,
      .dtype = x.spec.dtype};
  return [args, run = plugins.gated_rms_norm](const StepShape& shape, Stream stream) {
    GatedRmsNorm step = args;
    step.num_tokens = shape.num_tokens;
    run(step, stream);
  };
}

/// Columns of a fused qkv projection: query and gate of every head, keys, values.
std::int64_t qkv_width(const ModelConfig& config) {
  return 2 * (config.num_heads + config.num_kv_heads) * config.head_dim;
}

Operator bind_rotary_kv_write(const OpBinder& bind, const ModelMemory& memory,
                              const PluginTable& plugins) {
  const ModelConfig& config = memory.config;
  const Buffer& qkv = bind.buffer("qkv", qkv_width(config));
  const RotaryKvWrite args{
      .qkv = qkv.data,
      .qkv_stride = qkv.spec.width,
      .q_norm = bind.weight<float>("q_norm", DType::kFloat32, {config.head_dim}),
      .k_norm = bind.weight<float>("k_norm", DType::kFloat32, {config.head_dim}),
      .inv_freq = memory.inv_freq,
      .positions = memory.step.positions,
      .section = {config.mrope_section[0], config.mrope_section[1], config.mrope_section[2]},
      .q_out = bind.buffer("out", config.num_heads * config.head_dim).data,
      .kv = paged_kv(memory, bind.attr("kv_layer", config.num_attention_layers)),
      .table = memory.slot.table,
      .rows = {},
      .num_heads = config.num_heads,
      .rotary_dim = config.rotary_dim,
      .attention_factor = config.attention_factor,
      .eps = config.rms_norm_eps,
      .dtype = qkv.spec.dtype};
  return [args, &memory, run = plugins.rotary_kv_write](const StepShape& shape, Stream stream) {
    RotaryKvWrite step = args;
    step.rows = rows_of(shape, memory.step);
    run(step, stream);
  };
}

Operator bind_gated_attention(const OpBinder& bind, const ModelMemory& memory,
                              const PluginTable& plugins) {
  const ModelConfig& config = memory.config;
  const std::int64_t width = config.num_heads * config.head_dim;
  const Buffer& q = bind.buffer("q", width);
  const Buffer& qkv = bind.buffer("qkv", qkv_width(config));
  const GatedAttention args{
      .q = q.data,
      .gate = column(qkv, config.head_dim),
      .gate_stride = qkv.spec.width,
      .gate_head_stride = 2 * config.head_dim,
      .out = bind.buffer("out", width).data,
      .kv = paged_kv(memory, bind.attr("kv_layer", config.num_attention_layers)),
      .table = memory.slot.table,
      .rows = {},
      .num_heads = config.num_heads,
      .scale = 1.0F / std::sqrt(static_cast<float>(config.head_dim)),
      .dtype = q.spec.dtype};
  return [args, &memory, run = plugins.gated_attention](const StepShape& shape, Stream stream) {
    GatedAttention step = args;
    step.rows = rows_of(shape, memory.step);
    run(step, stream);
  };
}

Operator bind_silu_mul(const OpBinder& bind, const PluginTable& plugins) {
  const std::int64_t dim = bind.any_buffer("out").spec.width;
  const Buffer& gate_up = bind.buffer("gate_up", 2 * dim);
  const SiluMul args{.gate_up = gate_up.data,
                     .out = bind.buffer("out", dim).data,
                     .num_tokens = 0,
                     .dim = dim,
                     .dtype = gate_up.spec.dtype};
  return [args, run = plugins.silu_mul](const StepShape& shape, Stream stream) {
    SiluMul step = args;
    step.num_tokens = shape.num_tokens;
    run(step, stream);
  };
}

Operator bind_gather_rows(const OpBinder& bind, const ModelMemory& memory,
                          const PluginTable& plugins) {
  const Buffer& x = bind.wide_buffer("x", 1);
  const GatherRows args{.x = x.data,
                        .index = memory.step.logit_index,
                        .out = bind.buffer("out", x.spec.width, RowKind::kLogits).data,
                        .num_out = 0,
                        .dim = x.spec.width,
                        .dtype = x.spec.dtype};
  return [args, run = plugins.gather_rows](const StepShape& shape, Stream stream) {
    GatherRows step = args;
    step.num_out = shape.num_logits;
    run(step, stream);
  };
}

Operator bind_sample_accept(const OpBinder& bind, const ModelMemory& memory,
                            const PluginTable& plugins) {
  const Buffer& logits = bind.buffer("logits", memory.config.vocab_size, RowKind::kLogits);
  const auto* values = static_cast<const float*>(logits.data);
  return [values, &memory, run = plugins.sample_accept](const StepShape& shape, Stream stream) {
    run({.logits = values,
         .vocab_size = memory.config.vocab_size,
         .table = memory.slot.table,
         .rows = rows_of(shape, memory.step),
         .sample_start = memory.step.sample_start,
         .sample_len = memory.step.sample_len,
         .token_ids = memory.step.token_ids,
         .forced = memory.slot.forced,
         .max_forced = memory.slot.max_forced,
         .token_counts = memory.slot.token_counts,
         .bias_ids = memory.slot.bias_ids,
         .bias_values = memory.slot.bias_values,
         .max_emitted = memory.step.max_emitted,
         .greedy_only = shape.greedy_only,
         .tokens = memory.step.tokens,
         .num_emitted = memory.step.num_emitted,
         .num_accepted = memory.step.num_accepted,
         .finish_reason = memory.step.finish_reason},
        stream);
  };
}

Operator bind_commit_round(const ModelMemory& memory, const PluginTable& plugins) {
  return [&memory, run = plugins.commit_round](const StepShape& shape, Stream stream) {
    run({.table = memory.slot.table,
         .rows = rows_of(shape, memory.step),
         .tokens = memory.step.tokens,
         .max_emitted = memory.step.max_emitted,
         .num_emitted = memory.step.num_emitted,
         .finish_reason = memory.step.finish_reason,
         .token_counts = memory.slot.token_counts,
         .vocab_size = memory.config.vocab_size,
         .ring_rows = memory.ring_rows,
         .history_limit = memory.history_limit,
         .prefill = shape.prefill},
        stream);
  };
}

}  // namespace

RowBatch rows_of(const StepShape& shape, const StepArrays& step) {
  return {.slots = step.slots,
          .row_start = step.row_start,
          .num_rows = shape.num_rows,
          .num_tokens = shape.num_tokens,
          .max_row_tokens = shape.max_row_tokens};
}

Operator bind_operator(const OpSpec& op, const ModelMemory& memory, Device& device) {
  const PluginTable& plugins = device.plugins();
  if (!op.segment.empty()) {
    return bind_segment(op, memory);
  }
  const OpBinder bind(op, memory);
  const std::string& name = op.plugin;
  if (name == "embedding") {
    return bind_embedding(bind, memory, plugins);
  }
  if (name == "image_rows") {
    return bind_image_rows(bind, memory, device);
  }
  if (name == "rms_norm") {
    return bind_rms_norm(bind, memory, plugins);
  }
  if (name == "causal_conv") {
    return bind_causal_conv(bind, memory, plugins);
  }
  if (name == "gated_delta_net_prefill") {
    return bind_gated_delta_net(bind, memory, plugins.gated_delta_net_prefill);
  }
  if (name == "gated_delta_net_verify") {
    return bind_gated_delta_net(bind, memory, plugins.gated_delta_net_verify);
  }
  if (name == "gated_rms_norm") {
    return bind_gated_rms_norm(bind, memory, plugins);
  }
  if (name == "rotary_kv_write") {
    return bind_rotary_kv_write(bind, memory, plugins);
  }
  if (name == "gated_attention") {
    return bind_gated_attention(bind, memory, plugins);
  }
  if (name == "silu_mul") {
    return bind_silu_mul(bind, plugins);
  }
  if (name == "gather_rows") {
    return bind_gather_rows(bind, memory, plugins);
  }
  if (name == "sample_accept") {
    return bind_sample_accept(bind, memory, plugins);
  }
  if (name == "commit_round") {
    return bind_commit_round(memory, plugins);
  }
  bind.fail("is not a plugin of this runtime");
}

}  // namespace deltaflash
