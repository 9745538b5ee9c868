#include "runtime/src/model_runner.h"

#include <algorithm>
#include <bit>
#include <set>
#include <stdexcept>

#include "plugins/common/error.h"

namespace deltaflash {
namespace {

std::int64_t power_of_two_at_least(std::int64_t value) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(value)));
}

std::vector<Operator> bind_step(const std::vector<OpSpec>& ops, const ModelMemory& memory,
                                const PluginTable& plugins) {
  std::vector<Operator> step;
  step.reserve(ops.size());
  for (const OpSpec& op : ops) {
    step.push_back(bind_operator(op, memory, plugins));
  }
  return step;
}

void collect_weights(const std::vector<OpSpec>& ops, std::set<std::string>& used) {
  for (const OpSpec& op : ops) {
    for (const auto& [key, name] : op.weights) {
      used.insert(name);
    }
  }
}

}  // namespace

ModelRunner::ModelRunner(const std::filesystem::path& engine_dir, const RunnerLimits& limits,
                         std::unique_ptr<Device> device, Program program)
    : limits_(limits),
      max_logits_(std::max(limits.max_prefill_chunk, limits.num_slots * (limits.max_draft + 1))),
      device_(std::move(device)) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(engine_dir / "weights")) {
    if (entry.path().extension() == ".safetensors") {
      paths.push_back(entry.path());
    }
  }
  std::sort(paths.begin(), paths.end());
  for (const auto& path : paths) {
    files_.push_back(std::make_unique<SafetensorsFile>(path));
  }
  memory_.config = program.config;
  load_weights(program);
  allocate_pools(program);
  const PluginTable& plugins = device_->plugins();
  prefill_ = bind_step(program.prefill, memory_, plugins);
  verify_ = bind_step(program.verify, memory_, plugins);
  commit_ = bind_step(program.commit, memory_, plugins);
  const auto logits = memory_.buffers.find("logits");
  if (logits == memory_.buffers.end() || logits->second.spec.width != program.config.vocab_size) {
    throw EngineError("program has no buffer \"logits\" of width vocab_size");
  }
  logits_ = static_cast<const float*>(logits->second.data);
}

void ModelRunner::load_weights(const Program& program) {
  for (const auto& file : files_) {
    for (const auto& [name, tensor] : file->tensors()) {
      const bool fresh =
          memory_.weights
              .emplace(name, Weight{device_->place_weight(tensor.data, tensor.num_bytes()),
                                    tensor.dtype, tensor.shape})
              .second;
      if (!fresh) {
        throw EngineError("weight \"" + name + "\" stands in two files of the engine");
      }
    }
  }
  std::set<std::string> used;
  collect_weights(program.prefill, used);
  collect_weights(program.verify, used);
  for (const auto& [name, spec] : program.segments) {
    if (spec.kind != "linear") {
      throw EngineError("segment " + name + " is of kind \"" + spec.kind +
                        "\", expected \"linear\"");
    }
    const auto found = memory_.weights.find(spec.weight);
    if (found == memory_.weights.end()) {
      throw EngineError("segment " + name + " uses weight \"" + spec.weight +
                        "\", which the engine does not hold");
    }
    if (found->second.shape != std::vector<std::int64_t>{spec.out_dim, spec.in_dim}) {
      throw EngineError("segment " + name + ": the shape of weight \"" + spec.weight +
                        "\" is not [" + std::to_string(spec.out_dim) + ", " +
                        std::to_string(spec.in_dim) + "]");
    }
    used.insert(spec.weight);
    memory_.segments.emplace(
        name, device_->provider().make_linear({.name = name,
                                               .weight = found->second.data,
                                               .weight_dtype = found->second.dtype,
                                               .in_dim = spec.in_dim,
                                               .out_dim = spec.out_dim}));
  }
  for (const auto& [name, weight] : memory_.weights) {
    if (!used.contains(name)) {
      throw EngineError("weight \"" + name + "\" is left over: no op of the program uses it");
    }
  }
}

template <typename T>
T* ModelRunner::allocate(std::int64_t count) {
  return static_cast<T*>(device_->allocate(static_cast<std::size_t>(count) * sizeof(T)));
}

void ModelRunner::allocate_pools(const Program& program) {
  const ModelConfig& config = program.config;
  const std::int64_t slots = limits_.num_slots;
  const std::int64_t longest_row = limits_.max_draft + 1;
  memory_.page_size = limits_.page_size;
  memory_.history_limit = limits_.history_limit;
  memory_.ring_rows =
      power_of_two_at_least(std::max(limits_.history_limit, longest_row) + longest_row);
  memory_.conv_ring_cols = power_of_two_at_least(config.conv_kernel - 1 + longest_row);

  for (const auto& [name, spec] : program.buffers) {
    const std::int64_t rows = spec.rows == RowKind::kTokens ? limits_.max_tokens : max_logits_;
    const auto bytes = static_cast<std::size_t>(rows * spec.width) * size_of(spec.dtype);
    memory_.buffers.emplace(name, Buffer{device_->allocate(bytes), spec});
  }

  const std::int64_t value_heads = config.num_value_heads;
  for (std::int64_t layer = 0; layer < config.num_gdn_layers; ++layer) {
    memory_.gdn_layers.push_back(
        {.state = allocate<float>(slots * value_heads * config.value_dim * config.key_dim),
         .ring_d = allocate<float>(slots * value_heads * memory_.ring_rows * config.value_dim),
         .ring_k =
             allocate<float>(slots * config.num_key_heads * memory_.ring_rows * config.key_dim),
         .ring_g = allocate<float>(slots * value_heads * memory_.ring_rows),
         .conv_ring = allocate<float>(slots * memory_.conv_ring_cols * config.conv_channels())});
  }
  const std::int64_t page_elements = config.num_kv_heads * limits_.page_size * config.head_dim;
  for (std::int64_t layer = 0; layer < config.num_attention_layers; ++layer) {
    memory_.kv_layers.push_back({.keys = allocate<float>(limits_.num_pages * page_elements),
                                 .values = allocate<float>(limits_.num_pages * page_elements)});
  }
  auto* inv_freq = allocate<float>(static_cast<std::int64_t>(config.inv_freq.size()));
  device_->upload(inv_freq, config.inv_freq.data(), config.inv_freq.size() * sizeof(float));
  memory_.inv_freq = inv_freq;

  const std::int64_t tokens = limits_.max_tokens;
  memory_.step = {.slots = allocate<std::int32_t>(slots),
                  .row_start = allocate<std::int32_t>(slots + 1),
                  .token_ids = allocate<std::int32_t>(tokens),
                  .positions = allocate<std::int32_t>(3 * tokens),
                  .logit_index = allocate<std::int32_t>(max_logits_),
                  .sample_start = allocate<std::int32_t>(slots),
                  .sample_len = allocate<std::int32_t>(slots),
                  .tokens = allocate<std::int32_t>(slots * longest_row),
                  .num_emitted = allocate<std::int32_t>(slots),
                  .num_accepted = allocate<std::int32_t>(slots),
                  .finish_reason = allocate<std::int32_t>(slots)};
  memory_.slot = {.table = allocate<SlotState>(slots),
                  .page_table = allocate<std::int32_t>(slots * limits_.max_pages),
                  .draft_ids = allocate<std::int32_t>(slots * limits_.max_draft),
                  .forced = allocate<std::int32_t>(slots * limits_.max_forced),
                  .script = allocate<std::int32_t>(slots * limits_.max_forced),
                  .max_pages = limits_.max_pages,
                  .max_draft = limits_.max_draft,
                  .max_forced = limits_.max_forced};
}

void ModelRunner::admit(std::int32_t slot, const SlotState& state,
                        std::span<const std::int32_t> pages, std::span<const std::int32_t> forced,
                        std::span<const std::int32_t> script) {
  std::vector<std::int32_t> page_row(static_cast<std::size_t>(limits_.max_pages), -1);
  std::copy(pages.begin(), pages.end(), page_row.begin());
  device_->upload(memory_.slot.table + slot, &state, sizeof state);
  device_->upload(memory_.slot.page_table + slot * limits_.max_pages, page_row.data(),
                  page_row.size() * sizeof(std::int32_t));
  device_->upload(memory_.slot.forced + slot * limits_.max_forced, forced.data(),
                  forced.size_bytes());
  device_->upload(memory_.slot.script + slot * limits_.max_forced, script.data(),
                  script.size_bytes());
}

void ModelRunner::launch(const StepPlan& plan) {
  std::vector<std::int32_t> slots;
  std::vector<std::int32_t> row_start{0};
  std::vector<std::int32_t> logit_index;
  std::vector<std::int32_t> sample_start;
  std::vector<std::int32_t> sample_len;
  StepResult result;
  for (const StepRow& row : plan.rows) {
    const std::int32_t begin = row_start.back();
    const std::int32_t end = begin + row.num_tokens;
    slots.push_back(row.slot);
    row_start.push_back(end);
    result.logit_start.push_back(static_cast<std::int32_t>(logit_index.size()));
    // A verify row needs the logits of all its tokens, a prefill row those of its last at most.
    const std::int32_t first =
        !plan.prefill || row.all_logits ? begin : (row.samples ? end - 1 : end);
    for (std::int32_t token = first; token < end; ++token) {
      logit_index.push_back(token);
    }
    const std::int32_t sampled = row.samples ? (plan.prefill ? 1 : row.num_tokens) : 0;
    sample_start.push_back(
        row.samples ? static_cast<std::int32_t>(logit_index.size()) - sampled : -1);
    sample_len.push_back(sampled);
  }
  const StepShape shape{.num_rows = static_cast<std::int64_t>(slots.size()),
                        .num_tokens = row_start.back(),
                        .num_logits = static_cast<std::int64_t>(logit_index.size()),
                        .prefill = plan.prefill};
  if (shape.num_rows > limits_.num_slots || shape.num_tokens > limits_.max_tokens ||
      shape.num_logits > max_logits_) {
    throw std::logic_error("a step was planned beyond the runner's limits");
  }

  const auto upload = [this](std::int32_t* device, const std::vector<std::int32_t>& host) {
    device_->upload(device, host.data(), host.size() * sizeof(std::int32_t));
  };
  upload(memory_.step.slots, slots);
  upload(memory_.step.row_start, row_start);
  upload(memory_.step.sample_start, sample_start);
  upload(memory_.step.sample_len, sample_len);
  if (plan.prefill) {
    upload(memory_.step.token_ids, plan.token_ids);
    upload(memory_.step.positions, plan.positions);
    upload(memory_.step.logit_index, logit_index);
  }
  const Stream stream = device_->stream();
  if (plan.scripted_draft) {
    device_->plugins().scripted_draft(
        {.table = memory_.slot.table,
         .forced = memory_.slot.forced,
         .script = memory_.slot.script,
         .max_forced = limits_.max_forced,
         .rows = {memory_.step.slots, memory_.step.row_start, shape.num_rows, shape.num_tokens},
         .draft_ids = memory_.slot.draft_ids,
         .max_draft = limits_.max_draft,
         .vocab_size = static_cast<std::int32_t>(memory_.config.vocab_size)},
        stream);
  }
  for (const Operator& op : plan.prefill ? prefill_ : verify_) {
    op(shape, stream);
  }
  for (const Operator& op : commit_) {
    op(shape, stream);
  }

  const auto num_rows = static_cast<std::size_t>(shape.num_rows);
  result.max_emitted = limits_.max_draft + 1;
  const auto download = [this](std::vector<std::int32_t>& host, const std::int32_t* device,
                               std::size_t count) {
    host.resize(count);
    device_->download(host.data(), device, count * sizeof(std::int32_t));
  };
  // The vectors' storage stays where it is when the result moves into the queue.
  download(result.tokens, memory_.step.tokens,
           num_rows * static_cast<std::size_t>(result.max_emitted));
  download(result.num_emitted, memory_.step.num_emitted, num_rows);
  download(result.num_accepted, memory_.step.num_accepted, num_rows);
  download(result.finish_reason, memory_.step.finish_reason, num_rows);
  if (plan.read_logits) {
    result.logits.resize(
        static_cast<std::size_t>(shape.num_logits * memory_.config.vocab_size));
    device_->download(result.logits.data(), logits_, result.logits.size() * sizeof(float));
  }
  unread_.push_back({std::move(result), device_->record()});
}

StepResult ModelRunner::read() {
  Unread oldest = std::move(unread_.front());
  unread_.pop_front();
  oldest.event->wait();
  return std::move(oldest.result);
}

}  // namespace deltaflash
