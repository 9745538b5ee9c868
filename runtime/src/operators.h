#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "plugins/common/slot_table.h"
#include "runtime/src/device.h"
#include "runtime/src/program.h"

namespace deltaflash {

/// Device memory that every step writes anew: who runs, on what, and what came out.
struct StepArrays {
  std::int32_t* slots;          // [max_rows]
  std::int32_t* row_start;      // [max_rows + 1]
  std::int32_t* token_ids;      // [max_tokens]
  std::int32_t* positions;      // [3, num_tokens of the step]
  std::int32_t* logit_index;    // [max_logits]; token rows whose logits a prefill step needs
  std::int32_t* sample_start;   // [max_rows]
  std::int32_t* sample_len;     // [max_rows]
  std::int64_t max_emitted;     // longest verify row
  std::int32_t* tokens;         // [max_rows, max_emitted]
  std::int32_t* num_emitted;    // [max_rows]
  std::int32_t* num_accepted;   // [max_rows]
  std::int32_t* finish_reason;  // [max_rows]
  float* logprob;               // [max_rows, max_emitted]; of rows that ask for it
  std::int32_t* rank;           // [max_rows, max_emitted]
  std::int32_t* top_ids;        // [max_rows, max_emitted, kMaxTopLogprobs]
  float* top_logprobs;          // [max_rows, max_emitted, kMaxTopLogprobs]
};

/// Device memory that belongs to slots.
struct SlotArrays {
  SlotState* table;             // [num_slots]
  std::int32_t* page_table;     // [num_slots, max_pages]
  std::int32_t* forced;         // [num_slots, max_forced]
  std::int32_t* script;         // [num_slots, max_forced]
  std::uint16_t* token_counts;  // [num_slots, vocab_size]; read for slots with penalties
  std::int32_t* bias_ids;       // [num_slots, kMaxLogitBiases]
  float* bias_values;           // [num_slots, kMaxLogitBiases]
  std::int64_t max_pages;
  std::int64_t max_forced;
};

/// One layer's share of the GDN pools.
struct GdnLayer {
  float* state;
  void* ring_d;
  void* ring_k;
  float* ring_g;
  void* conv_ring;
};

/// One layer's share of the KV pool.
struct KvLayer {
  void* keys;
  void* values;
};

struct Buffer {
  void* data;
  BufferSpec spec;
};

struct Weight {
  const void* data;  // device memory
  DType dtype;
  std::vector<std::int64_t> shape;
};

/// A dense part of the network and what it multiplies.
struct BoundSegment {
  SegmentSpec spec;
  std::unique_ptr<Segment> run;
};

/// Rows of a picture that stand in for embeddings of a prefill step.
struct ImageRows {
  std::int64_t first_token;  // packed
  std::int64_t num_tokens;
  const float* values;  // host memory, [num_tokens, hidden_size]
};

/// Everything an op may be bound to. Outlives the operators.
struct ModelMemory {
  ModelConfig config;
  std::map<std::string, Buffer> buffers;
  std::map<std::string, Weight> weights;
  std::map<std::string, BoundSegment> segments;
  std::vector<GdnLayer> gdn_layers;
  std::vector<KvLayer> kv_layers;
  const float* inv_freq;  // device memory
  StepArrays step;
  std::vector<ImageRows> image_rows;  // of the prefill step at hand
  SlotArrays slot;
  std::int64_t page_size;
  std::int64_t conv_ring_cols;
  std::int64_t ring_rows;
  std::int64_t history_limit;
};

/// The sizes of the step at hand.
struct StepShape {
  std::int64_t num_rows;
  std::int64_t num_tokens;
  std::int64_t num_logits;
  std::int64_t max_row_tokens;
  bool prefill;
  bool greedy_only;
  bool logprobs;

  auto operator<=>(const StepShape&) const = default;
};

RowBatch rows_of(const StepShape& shape, const StepArrays& step);

using Operator = std::function<void(const StepShape&, Stream)>;

/// Binds an op of the program to memory and to a device, so that running a step is calling its
/// operators in order. Throws EngineError for an op, buffer or weight that is unknown or of the
/// wrong size.
Operator bind_operator(const OpSpec& op, const ModelMemory& memory, Device& device);

}  // namespace deltaflash
