#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "plugins/common/error.h"
#include "plugins/common/thread_pool.h"
#include "plugins/linear/linear.h"
#include "runtime/src/device.h"

namespace deltaflash {
namespace {

class CpuLinear final : public Segment {
 public:
  explicit CpuLinear(const LinearSegment& spec) : spec_(spec) {}

  void launch(Stream stream, std::int64_t num_tokens, std::span<const void* const> inputs,
              std::span<void* const> outputs) override {
    cpu::linear({.x = static_cast<const float*>(inputs[0]),
                 .weight = static_cast<const BFloat16*>(spec_.weight),
                 .out = static_cast<float*>(outputs[0]),
                 .num_tokens = num_tokens,
                 .in_dim = spec_.in_dim,
                 .out_dim = spec_.out_dim},
                stream);
  }

 private:
  LinearSegment spec_;
};

class CpuProvider final : public SegmentProvider {
 public:
  std::string_view name() const override { return "cpu"; }

  std::unique_ptr<Segment> make_linear(const LinearSegment& spec) override {
    if (spec.weight_dtype != DType::kBFloat16) {
      throw EngineError("segment " + spec.name + ": weight is " +
                        std::string(name_of(spec.weight_dtype)) +
                        ", the cpu provider needs bfloat16");
    }
    return std::make_unique<CpuLinear>(spec);
  }
};

/// Work has ended before a launch returns, so there is nothing to wait for.
class CpuEvent final : public Event {
 public:
  void wait() override {}
};

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(int num_threads) : pool_(num_threads) {}
  CpuDevice(const CpuDevice&) = delete;
  CpuDevice& operator=(const CpuDevice&) = delete;

  ~CpuDevice() override {
    for (const auto& [address, num_bytes] : allocations_) {
      ::munmap(address, num_bytes);
    }
  }

  std::string_view name() const override { return "cpu"; }

  void* allocate(std::size_t num_bytes) override {
    const std::size_t size = num_bytes == 0 ? 1 : num_bytes;
    void* address =
        ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) {
      throw EngineError("cannot allocate " + std::to_string(size) +
                        " bytes: " + std::generic_category().message(errno));
    }
    allocations_.emplace_back(address, size);
    return address;
  }

  void* allocate_host(std::size_t num_bytes) override { return allocate(num_bytes); }

  const void* place_weight(const void* host, std::size_t /*num_bytes*/) override { return host; }

  void upload(void* device, const void* host, std::size_t num_bytes) override {
    if (num_bytes > 0) {
      std::memcpy(device, host, num_bytes);
    }
  }

  void download(void* host, const void* device, std::size_t num_bytes) override {
    if (num_bytes > 0) {
      std::memcpy(host, device, num_bytes);
    }
  }

  std::unique_ptr<Event> record() override { return std::make_unique<CpuEvent>(); }

  bool launch_waits() const override { return true; }

  bool can_capture() const override { return false; }

  std::unique_ptr<Graph> capture(const std::function<void()>& /*work*/) override {
    throw std::logic_error("the CPU backend has no graphs");
  }

  Stream stream() override { return {&pool_}; }

  const PluginTable& plugins() const override {
    static constexpr PluginTable kTable = {
        .causal_conv = cpu::causal_conv,
        .commit_round = cpu::commit_round,
        .embedding = cpu::embedding,
        .gated_attention = cpu::gated_attention,
        .gated_delta_net_prefill = cpu::gated_delta_net_prefill,
        .gated_delta_net_verify = cpu::gated_delta_net_verify,
        .gated_rms_norm = cpu::gated_rms_norm,
        .gather_rows = cpu::gather_rows,
        .rms_norm = cpu::rms_norm,
        .rotary_kv_write = cpu::rotary_kv_write,
        .round_metadata = cpu::round_metadata,
        .sample_accept = cpu::sample_accept,
        .scripted_draft = cpu::scripted_draft,
        .silu_mul = cpu::silu_mul,
        .token_logprobs = cpu::token_logprobs,
        .bias_activation = cpu::bias_activation,
        .bias_residual = cpu::bias_residual,
        .layer_norm = cpu::layer_norm,
        .patchify = cpu::patchify,
        .vision_attention = cpu::vision_attention,
        .vision_position_embedding = cpu::vision_position_embedding,
        .vision_rotary = cpu::vision_rotary,
    };
    return kTable;
  }

  SegmentProvider& provider() override { return provider_; }

 private:
  ThreadPool pool_;
  CpuProvider provider_;
  std::vector<std::pair<void*, std::size_t>> allocations_;
};

}  // namespace

std::unique_ptr<Device> make_cpu_device(int num_threads) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  const int wanted = num_threads > 0 ? num_threads : std::max(1, cores);
  try {
    return std::make_unique<CpuDevice>(wanted);
  } catch (const std::system_error& error) {
    throw EngineError("device cpu: cannot start " + std::to_string(wanted) +
                      " threads (num_threads): " + error.code().message());
  }
}

}  // namespace deltaflash
