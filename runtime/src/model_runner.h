#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "plugins/common/slot_table.h"
#include "runtime/src/device.h"
#include "runtime/src/operators.h"
#include "runtime/src/program.h"
#include "runtime/src/safetensors.h"
#include "runtime/src/vision_encoder.h"

namespace deltaflash {

/// What the runner reserves memory for.
struct RunnerLimits {
  std::int64_t num_slots;
  std::int64_t max_tokens;         // of one step
  std::int64_t max_prefill_chunk;  // longest prefill row; may ask for the logits of all its tokens
  std::int64_t num_pages;
  std::int64_t page_size;
  std::int64_t max_pages;         // of one slot
  std::int64_t max_draft;         // a verify row has at most max_draft + 1 tokens
  std::int64_t history_limit;     // of the replay ring; 0 = absorb at start
  std::int64_t max_forced;        // test hooks; 0 = off
  std::int64_t max_unread;        // steps launched but not read
  std::int64_t max_image_pixels;  // the program's limit holds as well
  std::int64_t max_vision_tile;   // patches
};

/// What a sequence brings to its slot. Nothing of the slot's earlier life is read afterwards.
struct Admission {
  SlotState state;
  std::span<const std::int32_t> pages;
  std::span<const std::int32_t> prompt;  // counted if the state has penalties
  const std::map<std::int32_t, float>& logit_bias;
  std::span<const std::int32_t> forced;  // test hooks
  std::span<const std::int32_t> script;
};

/// One row of a step. The device knows the slot's lengths; the host says who runs.
struct StepRow {
  std::int32_t slot;
  std::int32_t num_tokens;  // prefill: of this chunk; verify: 1 + drafts
  bool samples;             // verify rows always; prefill rows with their prompt's last chunk
  bool all_logits;          // prefill: logits of every token of the chunk, not the last one's
};

/// One step of the network over packed rows.
struct StepPlan {
  bool prefill = false;
  bool scripted_draft = false;  // verify: run the scripted drafter first
  bool greedy_only = false;     // every row takes the arg max of its logits as they are
  bool logprobs = false;        // some row asks for them, SlotState::num_logprobs
  bool read_logits = false;
  std::vector<StepRow> rows;
  std::vector<std::int32_t> token_ids;  // prefill: packed
  std::vector<std::int32_t> positions;  // prefill: [3, num_tokens]
  std::vector<ImageRows> image_rows;    // prefill; read while it is launched
};

/// What a step emitted, row by row of its plan.
struct StepResult {
  std::int64_t max_emitted = 0;
  std::vector<std::int32_t> tokens;  // [num_rows, max_emitted]
  std::vector<std::int32_t> num_emitted;
  std::vector<std::int32_t> num_accepted;
  std::vector<std::int32_t> finish_reason;
  std::vector<std::int32_t> logit_start;  // first row of `logits` of each plan row
  std::vector<float> logits;              // [num_logits, vocab_size], if read_logits
  // Of plans with logprobs, as token_logprobs.h has them; entries that it does not write are junk.
  std::vector<float> logprob;
  std::vector<std::int32_t> rank;
  std::vector<std::int32_t> top_ids;
  std::vector<float> top_logprobs;
};

/// Weights, pools and steps of one model on one device. Steps are launched in order and read in
/// order; a step may be launched before an older one has been read.
class ModelRunner {
 public:
  /// Loads `program.json` and `weights/` of an engine directory.
  /// Throws EngineError if they do not fit each other or the device.
  ModelRunner(const std::filesystem::path& engine_dir, const RunnerLimits& limits,
              std::unique_ptr<Device> device, const Program& program);

  /// Waits for what was launched: its memory goes with the runner.
  ~ModelRunner();
  ModelRunner(const ModelRunner&) = delete;
  ModelRunner& operator=(const ModelRunner&) = delete;

  const ModelConfig& config() const { return memory_.config; }
  std::int64_t max_logits() const { return max_logits_; }
  std::string_view device_name() const { return device_->name(); }
  bool launch_waits() const { return device_->launch_waits(); }

  /// Null where the engine has no vision encoder or the device cannot run it.
  VisionEncoder* vision() { return vision_.get(); }

  /// Hands a slot to a sequence.
  void admit(std::int32_t slot, const Admission& admission);

  /// Enqueues a step and its read-back. At most RunnerLimits::max_unread steps may be unread.
  void launch(const StepPlan& plan);

  /// Waits for the oldest step that has not been read.
  StepResult read();

 private:
  /// Host memory of one step between its launch and its reading.
  struct Staging {
    std::int32_t* input;     // what the step is told, see `launch_prefill` and `launch_verify`
    std::int32_t* results;   // tokens | num_emitted | num_accepted | finish_reason
    std::int32_t* logprobs;  // logprob | rank | top_ids | top_logprobs
  };

  struct Unread {
    StepResult result;  // its vectors are filled from `results` when the step is read
    Staging staging;
    bool logprobs;
    std::size_t num_rows;  // of the plan
    std::size_t stride;    // rows that the staging has room for
    std::unique_ptr<Event> event;
  };

  void load_weights(const Program& program, bool with_vision);
  void make_segment(const std::string& name, const SegmentSpec& spec);
  void allocate_pools(const Program& program);
  void allocate_step_arrays();
  template <typename T>
  T* allocate(std::initializer_list<std::int64_t> shape);
  void launch_prefill(const StepPlan& plan, const Staging& staging);
  void launch_verify(const StepPlan& plan, const Staging& staging);
  StepShape verify_shape(const StepPlan& plan) const;
  void run(const StepShape& shape);
  void check_limits(const StepShape& shape) const;

  RunnerLimits limits_;
  std::int64_t max_logits_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::unique_ptr<Device> device_;  // after files_: weights are mapped for as long as it lives
  ModelMemory memory_;
  std::unique_ptr<VisionEncoder> vision_;
  std::vector<Operator> prefill_;
  std::vector<Operator> verify_;
  std::vector<Operator> commit_;
  std::map<StepShape, std::unique_ptr<Graph>> graphs_;  // captured verify rounds
  const float* logits_ = nullptr;
  std::vector<Staging> staging_;  // one for each step that may be unread, used in turn
  std::size_t next_staging_ = 0;
  std::deque<Unread> unread_;
};

}  // namespace deltaflash
