#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "plugins/bias_activation/bias_activation.h"
#include "plugins/bias_residual/bias_residual.h"
#include "plugins/causal_conv/causal_conv.h"
#include "plugins/commit/commit.h"
#include "plugins/common/dtype.h"
#include "plugins/common/stream.h"
#include "plugins/embedding/embedding.h"
#include "plugins/gated_attention/gated_attention.h"
#include "plugins/gated_delta_net/gated_delta_net.h"
#include "plugins/gated_rms_norm/gated_rms_norm.h"
#include "plugins/gather_rows/gather_rows.h"
#include "plugins/layer_norm/layer_norm.h"
#include "plugins/patchify/patchify.h"
#include "plugins/rms_norm/rms_norm.h"
#include "plugins/rotary_kv_write/rotary_kv_write.h"
#include "plugins/round_metadata/round_metadata.h"
#include "plugins/sampling/sampling.h"
#include "plugins/scripted_draft/scripted_draft.h"
#include "plugins/silu_mul/silu_mul.h"
#include "plugins/token_logprobs/token_logprobs.h"
#include "plugins/vision_attention/vision_attention.h"
#include "plugins/vision_position_embedding/vision_position_embedding.h"
#include "plugins/vision_rotary/vision_rotary.h"

namespace deltaflash {

/// The ops of one device. The same program runs on every device: only these pointers differ.
struct PluginTable {
  void (*causal_conv)(const CausalConv&, Stream);
  void (*commit_round)(const CommitRound&, Stream);
  void (*embedding)(const Embedding&, Stream);
  void (*gated_attention)(const GatedAttention&, Stream);
  void (*gated_delta_net_prefill)(const GatedDeltaNet&, Stream);
  void (*gated_delta_net_verify)(const GatedDeltaNet&, Stream);
  void (*gated_rms_norm)(const GatedRmsNorm&, Stream);
  void (*gather_rows)(const GatherRows&, Stream);
  void (*rms_norm)(const RmsNorm&, Stream);
  void (*rotary_kv_write)(const RotaryKvWrite&, Stream);
  void (*round_metadata)(const RoundMetadata&, Stream);
  void (*sample_accept)(const SampleAccept&, Stream);
  void (*scripted_draft)(const ScriptedDraft&, Stream);
  void (*silu_mul)(const SiluMul&, Stream);
  void (*token_logprobs)(const TokenLogprobs&, Stream);
  // Of the vision step; all null on a device that cannot run it.
  void (*bias_activation)(const BiasActivation&, Stream) = nullptr;
  void (*bias_residual)(const BiasResidual&, Stream) = nullptr;
  void (*layer_norm)(const LayerNorm&, Stream) = nullptr;
  void (*patchify)(const Patchify&, Stream) = nullptr;
  void (*vision_attention)(const VisionAttention&, Stream) = nullptr;
  void (*vision_position_embedding)(const VisionPositionEmbedding&, Stream) = nullptr;
  void (*vision_rotary)(const VisionRotary&, Stream) = nullptr;
};

/// A dense part of the network, ready to run.
class Segment {
 public:
  virtual ~Segment() = default;

  /// Enqueues on `stream`; rows of inputs and outputs are packed.
  virtual void launch(Stream stream, std::int64_t num_tokens, std::span<const void* const> inputs,
                      std::span<void* const> outputs) = 0;
};

/// out = x * weight^T
struct LinearSegment {
  std::string name;
  const void* weight;  // device memory, [out_dim, in_dim]
  DType weight_dtype;
  std::int64_t in_dim;
  std::int64_t out_dim;
};

/// Who makes the segments of an engine: `cpu`, `cublaslt`, `tensorrt`.
class SegmentProvider {
 public:
  virtual ~SegmentProvider() = default;
  virtual std::string_view name() const = 0;
  virtual std::unique_ptr<Segment> make_linear(const LinearSegment& spec) = 0;
};

/// A place in a device's stream that the host can wait for.
class Event {
 public:
  virtual ~Event() = default;
  virtual void wait() = 0;
};

/// Captured work that can be launched again and again with one call.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual void launch() = 0;
};

/// Memory, one stream, the ops and the provider of segments. One thread uses a device.
class Device {
 public:
  virtual ~Device() = default;
  virtual std::string_view name() const = 0;

  /// Zero-filled, at least 64-byte aligned; lives as long as the device.
  virtual void* allocate(std::size_t num_bytes) = 0;

  /// Host memory that ops can read and write as well; lives as long as the device.
  virtual void* allocate_host(std::size_t num_bytes) = 0;

  /// Makes mapped weights readable for the ops; the mapping must outlive the device.
  virtual const void* place_weight(const void* host, std::size_t num_bytes) = 0;

  /// Stream-ordered copies. `host` of an upload may be reused at once; `host` of a download is
  /// filled once an event recorded after it has been waited for.
  virtual void upload(void* device, const void* host, std::size_t num_bytes) = 0;
  virtual void download(void* host, const void* device, std::size_t num_bytes) = 0;
  virtual std::unique_ptr<Event> record() = 0;

  /// Whether a launch returns when its work is done, so that the host's clock measures it.
  virtual bool launch_waits() const { return false; }

  /// Whether `capture` works. Where it does, verify rounds run as graphs of bucketed shapes;
  /// elsewhere they run op by op in exact shapes.
  virtual bool can_capture() const = 0;

  /// What `work` enqueues on `stream()`, without running it.
  virtual std::unique_ptr<Graph> capture(const std::function<void()>& work) = 0;

  virtual Stream stream() = 0;
  virtual const PluginTable& plugins() const = 0;
  virtual SegmentProvider& provider() = 0;
};

/// The CPU backend: plain memory, a pool of `num_threads` threads (0 = all cores), the CPU twins.
/// Throws EngineError where the system has no room for so many threads.
std::unique_ptr<Device> make_cpu_device(int num_threads);

}  // namespace deltaflash
