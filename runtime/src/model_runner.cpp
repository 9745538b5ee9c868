#include "runtime/src/model_runner.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <set>
#include <stdexcept>

#include "plugins/common/error.h"
#include "plugins/sampling/logit_rules.h"

namespace deltaflash {
namespace {

/// What token_logprobs says of a token: logprob, rank, candidates and their logprobs.
constexpr std::int64_t kNumLogprobWords = 2 + 2 * kMaxTopLogprobs;

std::size_t num_bytes(std::initializer_list<std::int64_t> shape, std::size_t element_bytes) {
  std::size_t bytes = element_bytes;
  for (const std::int64_t extent : shape) {
    if (__builtin_mul_overflow(bytes, static_cast<std::size_t>(extent), &bytes)) {
      throw EngineError("engine and limits ask for more memory than can be addressed");
    }
  }
  return bytes;
}

std::int64_t power_of_two_at_least(std::int64_t value) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(value)));
}

/// Rows of logits that a row of a plan needs. A prefill row takes those of its last tokens.
std::int32_t num_logit_rows(const StepPlan& plan, const StepRow& row) {
  if (!plan.prefill || row.all_logits) {
    return row.num_tokens;
  }
  return row.samples ? 1 : 0;
}

/// The verify kernels exist for rows of up to 1, 4, 8 and 16 tokens.
std::int64_t row_template(std::int64_t num_tokens) {
  for (const std::int64_t most : {1, 4, 8, 16}) {
    if (num_tokens <= most) {
      return most;
    }
  }
  throw std::logic_error("a verify row has more than 16 tokens");
}

std::vector<Operator> bind_step(const std::vector<OpSpec>& ops, const ModelMemory& memory,
                                Device& device) {
  std::vector<Operator> step;
  step.reserve(ops.size());
  for (const OpSpec& op : ops) {
    step.push_back(bind_operator(op, memory, device));
  }
  return step;
}

/// Adds the weights that ops and their segments use.
void collect_weights(const Program& program, const std::vector<OpSpec>& ops,
                     std::set<std::string>& used) {
  for (const OpSpec& op : ops) {
    for (const auto& [key, name] : op.weights) {
      used.insert(name);
    }
    if (const auto found = program.segments.find(op.segment); found != program.segments.end()) {
      used.insert(found->second.weight);
    }
  }
}

bool is_buffer_of_vision(const BufferSpec& spec) {
  return spec.rows != RowKind::kTokens && spec.rows != RowKind::kLogits;
}

}  // namespace

ModelRunner::ModelRunner(const std::filesystem::path& engine_dir, const RunnerLimits& limits,
                         std::unique_ptr<Device> device, const Program& program)
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
  const bool with_vision =
      program.vision && device_->launch_waits() && has_vision_ops(device_->plugins());
  load_weights(program, with_vision);
  allocate_pools(program);
  prefill_ = bind_step(program.prefill, memory_, *device_);
  verify_ = bind_step(program.verify, memory_, *device_);
  commit_ = bind_step(program.commit, memory_, *device_);
  if (with_vision) {
    vision_ = std::make_unique<VisionEncoder>(
        *device_, memory_, program, std::min(limits.max_image_pixels, program.vision->max_pixels),
        limits.max_vision_tile);
  }
  const auto logits = memory_.buffers.find("logits");
  if (logits == memory_.buffers.end() || logits->second.spec.width != program.config.vocab_size) {
    throw EngineError("program has no buffer \"logits\" of width vocab_size");
  }
  logits_ = static_cast<const float*>(logits->second.data);
}

ModelRunner::~ModelRunner() {
  for (const Unread& unread : unread_) {
    try {
      unread.event->wait();
    } catch (const std::exception&) {
      return;  // the device is lost, so nothing runs on it
    }
  }
}

void ModelRunner::load_weights(const Program& program, bool with_vision) {
  std::set<std::string> used;
  collect_weights(program, program.prefill, used);
  collect_weights(program, program.verify, used);
  std::set<std::string> used_by_vision;
  for (const auto& stage : program.vision_stages) {
    collect_weights(program, stage, used_by_vision);
  }
  for (const auto& file : files_) {
    for (const auto& [name, tensor] : file->tensors()) {
      if (!used.contains(name) && !used_by_vision.contains(name)) {
        throw EngineError("weight \"" + name + "\" is left over: no op of the program uses it");
      }
      if (!used.contains(name) && !with_vision) {
        continue;
      }
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
  for (const auto& [name, spec] : program.segments) {
    if (with_vision || used.contains(spec.weight) || !used_by_vision.contains(spec.weight)) {
      make_segment(name, spec);
    }
  }
}

void ModelRunner::make_segment(const std::string& name, const SegmentSpec& spec) {
  if (spec.kind != "linear") {
    throw EngineError("segment " + name + " is of kind \"" + spec.kind + "\", expected \"linear\"");
  }
  const auto found = memory_.weights.find(spec.weight);
  if (found == memory_.weights.end()) {
    throw EngineError("segment " + name + " uses weight \"" + spec.weight +
                      "\", which the engine does not hold");
  }
  if (found->second.shape != std::vector<std::int64_t>{spec.out_dim, spec.in_dim}) {
    throw EngineError("segment " + name + ": the shape of weight \"" + spec.weight + "\" is not [" +
                      std::to_string(spec.out_dim) + ", " + std::to_string(spec.in_dim) + "]");
  }
  auto segment = device_->provider().make_linear({.name = name,
                                                  .weight = found->second.data,
                                                  .weight_dtype = found->second.dtype,
                                                  .in_dim = spec.in_dim,
                                                  .out_dim = spec.out_dim});
  memory_.segments.emplace(name, BoundSegment{spec, std::move(segment)});
}

template <typename T>
T* ModelRunner::allocate(std::initializer_list<std::int64_t> shape) {
  return static_cast<T*>(device_->allocate(num_bytes(shape, sizeof(T))));
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
    if (is_buffer_of_vision(spec)) {
      continue;  // the vision encoder's
    }
    const std::int64_t rows = spec.rows == RowKind::kTokens ? limits_.max_tokens : max_logits_;
    const std::size_t bytes = num_bytes({rows, spec.width}, size_of(spec.dtype));
    memory_.buffers.emplace(name, Buffer{device_->allocate(bytes), spec});
  }

  const std::int64_t value_heads = config.num_value_heads;
  for (std::int64_t layer = 0; layer < config.num_gdn_layers; ++layer) {
    memory_.gdn_layers.push_back(
        {.state = allocate<float>({slots, value_heads, config.value_dim, config.key_dim}),
         .ring_d = allocate<float>({slots, value_heads, memory_.ring_rows, config.value_dim}),
         .ring_k =
             allocate<float>({slots, config.num_key_heads, memory_.ring_rows, config.key_dim}),
         .ring_g = allocate<float>({slots, value_heads, memory_.ring_rows}),
         .conv_ring = allocate<float>({slots, memory_.conv_ring_cols, config.conv_channels()})});
  }
  for (std::int64_t layer = 0; layer < config.num_attention_layers; ++layer) {
    const auto pool = [&] {
      return allocate<float>(
          {limits_.num_pages, config.num_kv_heads, limits_.page_size, config.head_dim});
    };
    memory_.kv_layers.push_back({.keys = pool(), .values = pool()});
  }
  auto* inv_freq = allocate<float>({static_cast<std::int64_t>(config.inv_freq.size())});
  device_->upload(inv_freq, config.inv_freq.data(), config.inv_freq.size() * sizeof(float));
  memory_.inv_freq = inv_freq;

  memory_.slot = {.table = allocate<SlotState>({slots}),
                  .page_table = allocate<std::int32_t>({slots, limits_.max_pages}),
                  .forced = allocate<std::int32_t>({slots, limits_.max_forced}),
                  .script = allocate<std::int32_t>({slots, limits_.max_forced}),
                  .token_counts = allocate<std::uint16_t>({slots, config.vocab_size}),
                  .bias_ids = allocate<std::int32_t>({slots, kMaxLogitBiases}),
                  .bias_values = allocate<float>({slots, kMaxLogitBiases}),
                  .max_pages = limits_.max_pages,
                  .max_forced = limits_.max_forced};
  allocate_step_arrays();
}

void ModelRunner::allocate_step_arrays() {
  const std::int64_t rows = limits_.num_slots;
  const std::int64_t tokens = limits_.max_tokens;
  const std::int64_t max_emitted = limits_.max_draft + 1;
  // One block for what comes back, so that reading a step is one copy; another for logprobs.
  const std::int64_t num_results = rows * (max_emitted + 3);
  auto* results = allocate<std::int32_t>({num_results});
  const std::int64_t places = rows * max_emitted;
  auto* logprobs = allocate<float>({places, kNumLogprobWords});
  memory_.step = {.slots = allocate<std::int32_t>({rows}),
                  .row_start = allocate<std::int32_t>({rows + 1}),
                  .token_ids = allocate<std::int32_t>({tokens}),
                  .positions = allocate<std::int32_t>({3, tokens}),
                  .logit_index = allocate<std::int32_t>({max_logits_}),
                  .sample_start = allocate<std::int32_t>({rows}),
                  .sample_len = allocate<std::int32_t>({rows}),
                  .max_emitted = max_emitted,
                  .tokens = results,
                  .num_emitted = results + rows * max_emitted,
                  .num_accepted = results + rows * (max_emitted + 1),
                  .finish_reason = results + rows * (max_emitted + 2),
                  .logprob = logprobs,
                  .rank = reinterpret_cast<std::int32_t*>(logprobs + places),
                  .top_ids = reinterpret_cast<std::int32_t*>(logprobs + 2 * places),
                  .top_logprobs = logprobs + (2 + kMaxTopLogprobs) * places};
  const std::int64_t num_inputs = 4 * rows + 1 + 4 * tokens + max_logits_;
  for (std::int64_t step = 0; step < limits_.max_unread; ++step) {
    const auto host = [this](std::int64_t count) {
      return static_cast<std::int32_t*>(
          device_->allocate_host(static_cast<std::size_t>(count) * sizeof(std::int32_t)));
    };
    staging_.push_back({.input = host(num_inputs),
                        .results = host(num_results),
                        .logprobs = host(places * kNumLogprobWords)});
  }
}

void ModelRunner::admit(std::int32_t slot, const Admission& admission) {
  const auto& [state, pages, prompt, logit_bias, forced, script] = admission;
  std::vector<std::int32_t> page_row(static_cast<std::size_t>(limits_.max_pages), -1);
  std::copy(pages.begin(), pages.end(), page_row.begin());
  device_->upload(memory_.slot.table + slot, &state, sizeof state);
  device_->upload(memory_.slot.page_table + slot * limits_.max_pages, page_row.data(),
                  page_row.size() * sizeof(std::int32_t));
  device_->upload(memory_.slot.forced + slot * limits_.max_forced, forced.data(),
                  forced.size_bytes());
  device_->upload(memory_.slot.script + slot * limits_.max_forced, script.data(),
                  script.size_bytes());
  if (has_penalties(state)) {
    std::vector<std::uint16_t> counts(static_cast<std::size_t>(memory_.config.vocab_size), 0);
    for (const std::int32_t id : prompt) {
      counts[static_cast<std::size_t>(id)] = kTokenInPrompt;
    }
    device_->upload(memory_.slot.token_counts + slot * memory_.config.vocab_size, counts.data(),
                    counts.size() * sizeof(std::uint16_t));
  }
  if (!logit_bias.empty()) {
    std::vector<std::int32_t> ids;
    std::vector<float> values;
    for (const auto& [id, value] : logit_bias) {
      ids.push_back(id);
      values.push_back(value);
    }
    device_->upload(memory_.slot.bias_ids + slot * std::int64_t{kMaxLogitBiases}, ids.data(),
                    ids.size() * sizeof(std::int32_t));
    device_->upload(memory_.slot.bias_values + slot * std::int64_t{kMaxLogitBiases}, values.data(),
                    values.size() * sizeof(float));
  }
}

void ModelRunner::launch(const StepPlan& plan) {
  if (unread_.size() >= staging_.size()) {
    throw std::logic_error("more steps are launched than may be unread");
  }
  const Staging& staging = staging_[next_staging_++ % staging_.size()];
  Unread unread{.result = {},
                .staging = staging,
                .logprobs = plan.logprobs,
                .num_rows = plan.rows.size(),
                .stride = static_cast<std::size_t>(limits_.num_slots),
                .event = nullptr};
  unread.result.max_emitted = memory_.step.max_emitted;
  std::int32_t num_logits = 0;
  for (const StepRow& row : plan.rows) {
    unread.result.logit_start.push_back(num_logits);
    num_logits += num_logit_rows(plan, row);
  }
  if (plan.prefill) {
    launch_prefill(plan, staging);
  } else {
    launch_verify(plan, staging);
  }
  device_->download(staging.results, memory_.step.tokens,
                    unread.stride * static_cast<std::size_t>(memory_.step.max_emitted + 3) *
                        sizeof(std::int32_t));
  if (plan.logprobs) {
    device_->download(staging.logprobs, memory_.step.logprob,
                      num_bytes({limits_.num_slots, memory_.step.max_emitted, kNumLogprobWords},
                                sizeof(std::int32_t)));
  }
  if (plan.read_logits) {
    std::vector<float>& logits = unread.result.logits;
    logits.resize(static_cast<std::size_t>(num_logits * memory_.config.vocab_size));
    device_->download(logits.data(), logits_, logits.size() * sizeof(float));
  }
  // The logits' storage stays where it is when the result moves into the queue.
  unread.event = device_->record();
  unread_.push_back(std::move(unread));
}

void ModelRunner::launch_prefill(const StepPlan& plan, const Staging& staging) {
  std::vector<std::int32_t> slots;
  std::vector<std::int32_t> row_start{0};
  std::vector<std::int32_t> logit_index;
  std::vector<std::int32_t> sample_start;
  std::vector<std::int32_t> sample_len;
  std::int64_t max_row_tokens = 0;
  for (const StepRow& row : plan.rows) {
    const std::int32_t end = row_start.back() + row.num_tokens;
    for (std::int32_t token = end - num_logit_rows(plan, row); token < end; ++token) {
      logit_index.push_back(token);
    }
    slots.push_back(row.slot);
    row_start.push_back(end);
    sample_start.push_back(row.samples ? static_cast<std::int32_t>(logit_index.size()) - 1 : -1);
    sample_len.push_back(row.samples ? 1 : 0);
    max_row_tokens = std::max<std::int64_t>(max_row_tokens, row.num_tokens);
  }
  const StepShape shape{.num_rows = static_cast<std::int64_t>(slots.size()),
                        .num_tokens = row_start.back(),
                        .num_logits = static_cast<std::int64_t>(logit_index.size()),
                        .max_row_tokens = max_row_tokens,
                        .prefill = true,
                        .greedy_only = plan.greedy_only,
                        .logprobs = plan.logprobs};
  check_limits(shape);
  std::int32_t* next = staging.input;
  const auto upload = [&](std::int32_t* device, const std::vector<std::int32_t>& values) {
    std::copy(values.begin(), values.end(), next);
    device_->upload(device, next, values.size() * sizeof(std::int32_t));
    next += values.size();
  };
  upload(memory_.step.slots, slots);
  upload(memory_.step.row_start, row_start);
  upload(memory_.step.sample_start, sample_start);
  upload(memory_.step.sample_len, sample_len);
  upload(memory_.step.token_ids, plan.token_ids);
  upload(memory_.step.positions, plan.positions);
  upload(memory_.step.logit_index, logit_index);
  memory_.image_rows = plan.image_rows;
  run(shape);
}

StepShape ModelRunner::verify_shape(const StepPlan& plan) const {
  StepShape shape{.num_rows = static_cast<std::int64_t>(plan.rows.size()),
                  .num_tokens = 0,
                  .num_logits = 0,
                  .max_row_tokens = 0,
                  .prefill = false,
                  .greedy_only = plan.greedy_only,
                  .logprobs = plan.logprobs};
  for (const StepRow& row : plan.rows) {
    shape.num_tokens += row.num_tokens;
    shape.max_row_tokens = std::max<std::int64_t>(shape.max_row_tokens, row.num_tokens);
  }
  if (device_->can_capture()) {
    // Few shapes, so that few graphs serve all rounds.
    shape.num_rows = std::min(power_of_two_at_least(shape.num_rows), limits_.num_slots);
    shape.num_tokens = std::min(power_of_two_at_least(std::max(shape.num_rows, shape.num_tokens)),
                                limits_.num_slots * memory_.step.max_emitted);
    shape.max_row_tokens = row_template(shape.max_row_tokens);
  }
  shape.num_logits = shape.num_tokens;
  return shape;
}

void ModelRunner::launch_verify(const StepPlan& plan, const Staging& staging) {
  const StepShape shape = verify_shape(plan);
  check_limits(shape);
  std::int32_t* row_slots = staging.input;
  std::int32_t* row_len = staging.input + limits_.num_slots;
  for (std::size_t row = 0; row < static_cast<std::size_t>(shape.num_rows); ++row) {
    const bool real = row < plan.rows.size();
    row_slots[row] = real ? plan.rows[row].slot : -1;
    row_len[row] = real ? plan.rows[row].num_tokens : 0;
  }
  const PluginTable& plugins = device_->plugins();
  const Stream stream = device_->stream();
  plugins.round_metadata({.table = memory_.slot.table,
                          .row_slots = row_slots,
                          .row_len = row_len,
                          .num_rows = shape.num_rows,
                          .num_tokens = shape.num_tokens,
                          .slots = memory_.step.slots,
                          .row_start = memory_.step.row_start,
                          .token_ids = memory_.step.token_ids,
                          .positions = memory_.step.positions,
                          .sample_start = memory_.step.sample_start,
                          .sample_len = memory_.step.sample_len},
                         stream);
  if (plan.scripted_draft) {
    plugins.scripted_draft({.table = memory_.slot.table,
                            .forced = memory_.slot.forced,
                            .script = memory_.slot.script,
                            .max_forced = limits_.max_forced,
                            .rows = rows_of(shape, memory_.step),
                            .token_ids = memory_.step.token_ids,
                            .vocab_size = static_cast<std::int32_t>(memory_.config.vocab_size)},
                           stream);
  }
  if (!device_->can_capture()) {
    run(shape);
    return;
  }
  std::unique_ptr<Graph>& graph = graphs_[shape];
  if (!graph) {
    graph = device_->capture([&] { run(shape); });
  }
  graph->launch();
}

void ModelRunner::run(const StepShape& shape) {
  const Stream stream = device_->stream();
  for (const Operator& op : shape.prefill ? prefill_ : verify_) {
    op(shape, stream);
  }
  if (shape.logprobs) {
    device_->plugins().token_logprobs({.logits = logits_,
                                       .vocab_size = memory_.config.vocab_size,
                                       .table = memory_.slot.table,
                                       .rows = rows_of(shape, memory_.step),
                                       .sample_start = memory_.step.sample_start,
                                       .tokens = memory_.step.tokens,
                                       .num_emitted = memory_.step.num_emitted,
                                       .max_emitted = memory_.step.max_emitted,
                                       .logprob = memory_.step.logprob,
                                       .rank = memory_.step.rank,
                                       .top_ids = memory_.step.top_ids,
                                       .top_logprobs = memory_.step.top_logprobs},
                                      stream);
  }
  for (const Operator& op : commit_) {
    op(shape, stream);
  }
}

void ModelRunner::check_limits(const StepShape& shape) const {
  if (shape.num_rows > limits_.num_slots || shape.num_tokens > limits_.max_tokens ||
      shape.num_logits > max_logits_) {
    throw std::logic_error("a step was planned beyond the runner's limits");
  }
}

StepResult ModelRunner::read() {
  Unread oldest = std::move(unread_.front());
  unread_.pop_front();
  oldest.event->wait();
  const auto max_emitted = static_cast<std::size_t>(oldest.result.max_emitted);
  const std::int32_t* next = oldest.staging.results;
  const auto take = [&]<typename T>(std::size_t width, std::vector<T>& values) {
    static_assert(sizeof(T) == sizeof(*next));
    values.resize(oldest.num_rows * width);
    std::memcpy(values.data(), next, values.size() * sizeof(T));
    next += oldest.stride * width;
  };
  take(max_emitted, oldest.result.tokens);
  take(1, oldest.result.num_emitted);
  take(1, oldest.result.num_accepted);
  take(1, oldest.result.finish_reason);
  if (oldest.logprobs) {
    next = oldest.staging.logprobs;
    take(max_emitted, oldest.result.logprob);
    take(max_emitted, oldest.result.rank);
    take(max_emitted * kMaxTopLogprobs, oldest.result.top_ids);
    take(max_emitted * kMaxTopLogprobs, oldest.result.top_logprobs);
  }
  return std::move(oldest.result);
}

}  // namespace deltaflash
