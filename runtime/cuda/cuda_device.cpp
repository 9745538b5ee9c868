#include "runtime/src/cuda_device.h"

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <utility>

#include "plugins/common/cuda_error.h"
#include "plugins/common/error.h"
#include "runtime/cuda/arena.h"
#include "runtime/cuda/cublaslt_provider.h"
#include "runtime/cuda/device_code.h"
#include "runtime/cuda/exact_provider.h"
#include "runtime/cuda/handles.h"
#include "runtime/cuda/staged_upload.h"

namespace deltaflash::cuda {
namespace {

class CudaEvent final : public Event {
 public:
  explicit CudaEvent(cudaStream_t stream) : event_(make_event()) {
    check_cuda(cudaEventRecord(event_.get(), stream), "cudaEventRecord");
  }

  void wait() override { check_cuda(cudaEventSynchronize(event_.get()), "cudaEventSynchronize"); }

 private:
  OwnedEvent event_;
};

class CudaGraph final : public Graph {
 public:
  CudaGraph(OwnedGraphExec exec, cudaStream_t stream) : exec_(std::move(exec)), stream_(stream) {}

  void launch() override { check_cuda(cudaGraphLaunch(exec_.get(), stream_), "cudaGraphLaunch"); }

 private:
  OwnedGraphExec exec_;
  cudaStream_t stream_;
};

std::unique_ptr<SegmentProvider> make_provider(const CudaOptions& options, Arena& arena) {
  if (options.provider == "cublaslt") {
    if (options.max_tokens <= 0) {
      throw EngineError("the cublaslt provider needs max_tokens > 0, got " +
                        std::to_string(options.max_tokens));
    }
    return make_cublaslt_provider(arena, options.max_tokens);
  }
  if (options.provider == "exact") {
    return make_exact_provider();
  }
  throw EngineError("unknown provider \"" + options.provider +
                    "\" of the CUDA backend, expected \"cublaslt\" or \"exact\"");
}

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(const CudaOptions& options)
      : stream_(make_stream()),
        device_arena_(Arena::Place::kDevice, stream_.get()),
        host_arena_(Arena::Place::kPinnedHost, stream_.get()),
        upload_(host_arena_, stream_.get()),
        provider_(make_provider(options, device_arena_)) {}
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  ~CudaDevice() override {
    // Memory must outlive the work that uses it. A lost device has no work left.
    static_cast<void>(cudaStreamSynchronize(stream_.get()));
  }

  std::string_view name() const override { return "cuda"; }

  void* allocate(std::size_t num_bytes) override { return device_arena_.allocate(num_bytes); }

  void* allocate_host(std::size_t num_bytes) override { return host_arena_.allocate(num_bytes); }

  const void* place_weight(const void* host, std::size_t num_bytes) override {
    void* device = device_arena_.allocate(num_bytes);
    upload_.copy(device, host, num_bytes);
    return device;
  }

  void upload(void* device, const void* host, std::size_t num_bytes) override {
    upload_.copy(device, host, num_bytes);
  }

  void download(void* host, const void* device, std::size_t num_bytes) override {
    if (num_bytes > 0) {
      check_cuda(cudaMemcpyAsync(host, device, num_bytes, cudaMemcpyDeviceToHost, stream_.get()),
                 "cudaMemcpyAsync");
    }
  }

  std::unique_ptr<Event> record() override { return std::make_unique<CudaEvent>(stream_.get()); }

  bool can_capture() const override { return true; }

  std::unique_ptr<Graph> capture(const std::function<void()>& work) override;

  Stream stream() override { return {stream_.get()}; }

  const PluginTable& plugins() const override {
    static constexpr PluginTable kTable = {
        .causal_conv = causal_conv,
        .commit_round = commit_round,
        .embedding = embedding,
        .gated_attention = gated_attention,
        .gated_delta_net_prefill = gated_delta_net_prefill,
        .gated_delta_net_verify = gated_delta_net_verify,
        .gated_rms_norm = gated_rms_norm,
        .gather_rows = gather_rows,
        .rms_norm = rms_norm,
        .rotary_kv_write = rotary_kv_write,
        .round_metadata = round_metadata,
        .sample_accept = sample_accept,
        .scripted_draft = scripted_draft,
        .silu_mul = silu_mul,
        .token_logprobs = token_logprobs,
    };
    return kTable;
  }

  SegmentProvider& provider() override { return *provider_; }

 private:
  OwnedStream stream_;
  Arena device_arena_;
  Arena host_arena_;
  StagedUpload upload_;
  std::unique_ptr<SegmentProvider> provider_;
};

/// Ends the capture that `stream` is in; a capture that failed leaves no graph.
OwnedGraph end_capture(cudaStream_t stream, cudaError_t& status) {
  cudaGraph_t graph = nullptr;
  status = cudaStreamEndCapture(stream, &graph);
  return OwnedGraph(graph);
}

std::unique_ptr<Graph> CudaDevice::capture(const std::function<void()>& work) {
  check_cuda(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal),
             "cudaStreamBeginCapture");
  cudaError_t status = cudaSuccess;
  try {
    work();
  } catch (...) {
    end_capture(stream_.get(), status);
    static_cast<void>(cudaGetLastError());  // of the broken capture; the first error is the news
    throw;
  }
  const OwnedGraph graph = end_capture(stream_.get(), status);
  check_cuda(status, "cudaStreamEndCapture");
  cudaGraphExec_t exec = nullptr;
  check_cuda(cudaGraphInstantiate(&exec, graph.get(), 0), "cudaGraphInstantiate");
  OwnedGraphExec owned(exec);
  check_cuda(cudaGraphUpload(exec, stream_.get()), "cudaGraphUpload");
  return std::make_unique<CudaGraph>(std::move(owned), stream_.get());
}

/// Throws CudaError with what is missing, before anything is allocated.
void require_gpu() {
  int num_gpus = 0;
  const cudaError_t status = cudaGetDeviceCount(&num_gpus);
  if (status == cudaErrorInsufficientDriver) {
    int driver = 0;
    int runtime = 0;
    static_cast<void>(cudaDriverGetVersion(&driver));
    static_cast<void>(cudaRuntimeGetVersion(&runtime));
    if (driver == 0) {
      throw CudaError("no NVIDIA driver is installed");
    }
    throw CudaError("the NVIDIA driver supports CUDA " + std::to_string(driver / 1000) + "." +
                    std::to_string(driver % 1000 / 10) + ", this build needs " +
                    std::to_string(runtime / 1000) + "." + std::to_string(runtime % 1000 / 10));
  }
  if (status == cudaErrorNoDevice || (status == cudaSuccess && num_gpus == 0)) {
    throw CudaError("no GPU is visible");
  }
  check_cuda(status, "cudaGetDeviceCount");
  int gpu = 0;
  check_cuda(cudaGetDevice(&gpu), "cudaGetDevice");
  int major = 0;
  int minor = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu),
             "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu),
             "cudaDeviceGetAttribute");
  if (!has_device_code()) {
    throw CudaError("this build has no kernels for a GPU of compute capability " +
                    std::to_string(major) + "." + std::to_string(minor));
  }
}

}  // namespace
}  // namespace deltaflash::cuda

deltaflash::Device* deltaflash_make_cuda_device(const deltaflash::CudaOptions* options) {
  deltaflash::cuda::require_gpu();
  return new deltaflash::cuda::CudaDevice(*options);
}
