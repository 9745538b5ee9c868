#include "runtime/cuda/cublaslt_provider.h"

#include <cublasLt.h>

#include <array>
#include <bit>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>

#include "plugins/common/cuda_launch.h"
#include "plugins/common/error.h"
#include "runtime/cuda/handles.h"
#include "runtime/cuda/to_bfloat16.h"

namespace deltaflash::cuda {
namespace {

constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;
constexpr std::uint32_t kPointerAlignment = 16;  // bytes, of every operand

void check_cublas(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw CudaError(std::string(what) + ": " + cublasLtGetStatusString(status));
  }
}

using OwnedHandle = Owned<cublasLtHandle_t, cublasLtDestroy>;
using OwnedMatmul = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using OwnedLayout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using OwnedPreference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

OwnedHandle make_handle() {
  cublasLtHandle_t handle = nullptr;
  check_cublas(cublasLtCreate(&handle), "cublasLtCreate");
  return OwnedHandle(handle);
}

OwnedLayout make_layout(cudaDataType type, std::int64_t rows, std::int64_t cols) {
  cublasLtMatrixLayout_t layout = nullptr;
  check_cublas(cublasLtMatrixLayoutCreate(&layout, type, static_cast<std::uint64_t>(rows),
                                          static_cast<std::uint64_t>(cols), rows),
               "cublasLtMatrixLayoutCreate");
  return OwnedLayout(layout);
}

// cuBLASLt's matrices are column-major. A row-major [rows, cols] is a column-major [cols, rows], so
// out = x * weight^T is, column-major, out^T [out_dim, n] = (weight^T)^T * x^T.
OwnedMatmul make_matmul() {
  cublasLtMatmulDesc_t matmul = nullptr;
  check_cublas(cublasLtMatmulDescCreate(&matmul, CUBLAS_COMPUTE_32F, CUDA_R_32F),
               "cublasLtMatmulDescCreate");
  OwnedMatmul owned(matmul);
  const cublasOperation_t transposed = CUBLAS_OP_T;
  check_cublas(cublasLtMatmulDescSetAttribute(matmul, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                              sizeof transposed),
               "cublasLtMatmulDescSetAttribute");
  return owned;
}

OwnedPreference make_preference() {
  cublasLtMatmulPreference_t preference = nullptr;
  check_cublas(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
  OwnedPreference owned(preference);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check_cublas(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
                 "cublasLtMatmulPreferenceSetAttribute");
  };
  const std::uint64_t workspace_bytes = kWorkspaceBytes;
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, kPointerAlignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, kPointerAlignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, kPointerAlignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, kPointerAlignment);
  return owned;
}

class CublasltProvider final : public SegmentProvider {
 public:
  CublasltProvider(Arena& arena, std::int64_t max_tokens)
      : arena_(arena),
        max_tokens_(max_tokens),
        handle_(make_handle()),
        matmul_(make_matmul()),
        preference_(make_preference()),
        workspace_(arena.allocate(kWorkspaceBytes)) {}

  std::string_view name() const override { return "cublaslt"; }

  std::unique_ptr<Segment> make_linear(const LinearSegment& spec) override;

  /// out [num_tokens, out_dim] = x [num_tokens, in_dim] * weight^T
  void run(const LinearSegment& spec, const float* x, float* out, std::int64_t num_tokens,
           Stream stream);

 private:
  struct Layouts {
    OwnedLayout weight;
    OwnedLayout x;
    OwnedLayout out;
  };

  using Shape = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // in_dim, out_dim, tokens

  static Layouts make_layouts(const LinearSegment& spec, std::int64_t num_tokens);
  const cublasLtMatmulAlgo_t& algorithm(const LinearSegment& spec, std::int64_t num_tokens);

  Arena& arena_;
  std::int64_t max_tokens_;
  OwnedHandle handle_;
  OwnedMatmul matmul_;
  OwnedPreference preference_;
  void* workspace_;
  BFloat16* rounded_ = nullptr;  // [max_tokens, widest_in_dim]
  std::int64_t widest_in_dim_ = 0;
  std::map<Shape, cublasLtMatmulAlgo_t> algorithms_;
};

class CublasltLinear final : public Segment {
 public:
  CublasltLinear(CublasltProvider& provider, const LinearSegment& spec)
      : provider_(provider), spec_(spec) {}

  void launch(Stream stream, std::int64_t num_tokens, std::span<const void* const> inputs,
              std::span<void* const> outputs) override {
    provider_.run(spec_, static_cast<const float*>(inputs[0]), static_cast<float*>(outputs[0]),
                  num_tokens, stream);
  }

 private:
  CublasltProvider& provider_;
  LinearSegment spec_;
};

std::unique_ptr<Segment> CublasltProvider::make_linear(const LinearSegment& spec) {
  if (spec.weight_dtype != DType::kBFloat16) {
    throw EngineError("segment " + spec.name + ": weight is " +
                      std::string(name_of(spec.weight_dtype)) +
                      ", the cublaslt provider needs bfloat16");
  }
  if (spec.in_dim > widest_in_dim_) {
    // A narrower buffer stays allocated, for the graphs that may hold its address.
    rounded_ = static_cast<BFloat16*>(
        arena_.allocate(static_cast<std::size_t>(max_tokens_ * spec.in_dim) * sizeof(BFloat16)));
    widest_in_dim_ = spec.in_dim;
  }
  return std::make_unique<CublasltLinear>(*this, spec);
}

CublasltProvider::Layouts CublasltProvider::make_layouts(const LinearSegment& spec,
                                                         std::int64_t num_tokens) {
  return {.weight = make_layout(CUDA_R_16BF, spec.in_dim, spec.out_dim),
          .x = make_layout(CUDA_R_16BF, spec.in_dim, num_tokens),
          .out = make_layout(CUDA_R_32F, spec.out_dim, num_tokens)};
}

const cublasLtMatmulAlgo_t& CublasltProvider::algorithm(const LinearSegment& spec,
                                                        std::int64_t num_tokens) {
  const Shape shape{spec.in_dim, spec.out_dim, num_tokens};
  const auto known = algorithms_.find(shape);
  if (known != algorithms_.end()) {
    return known->second;
  }
  const Layouts layouts = make_layouts(spec, num_tokens);
  cublasLtMatmulHeuristicResult_t best = {};
  int num_found = 0;
  check_cublas(cublasLtMatmulAlgoGetHeuristic(handle_.get(), matmul_.get(), layouts.weight.get(),
                                              layouts.x.get(), layouts.out.get(), layouts.out.get(),
                                              preference_.get(), 1, &best, &num_found),
               "cublasLtMatmulAlgoGetHeuristic");
  if (num_found == 0) {
    throw CudaError("segment " + spec.name + ": cuBLASLt has no algorithm for " +
                    std::to_string(num_tokens) + " rows");
  }
  return algorithms_.emplace(shape, best.algo).first->second;
}

void CublasltProvider::run(const LinearSegment& spec, const float* x, float* out,
                           std::int64_t num_tokens, Stream stream) {
  if (num_tokens == 0) {
    return;
  }
  if (num_tokens > max_tokens_) {
    throw std::invalid_argument("segment " + spec.name + ": expected at most " +
                                std::to_string(max_tokens_) + " rows, got " +
                                std::to_string(num_tokens));
  }
  to_bfloat16(x, rounded_, num_tokens * spec.in_dim, stream);

  const Layouts layouts = make_layouts(spec, num_tokens);
  constexpr float kOne = 1.0F;
  constexpr float kZero = 0.0F;
  const auto matmul = [&](const cublasLtMatmulAlgo_t& algo) {
    return cublasLtMatmul(handle_.get(), matmul_.get(), &kOne, spec.weight, layouts.weight.get(),
                          rounded_, layouts.x.get(), &kZero, out, layouts.out.get(), out,
                          layouts.out.get(), &algo, workspace_, kWorkspaceBytes,
                          cuda_stream(stream));
  };
  // One algorithm serves all row counts up to a power of two. Where cuBLASLt refuses it, the exact
  // count gets its own.
  const auto bucket =
      static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(num_tokens)));
  const Shape exact{spec.in_dim, spec.out_dim, num_tokens};
  if (bucket != num_tokens && !algorithms_.contains(exact)) {
    const cublasLtMatmulAlgo_t& shared = algorithm(spec, bucket);
    cublasLtMatmulHeuristicResult_t checked = {};
    const bool fits = cublasLtMatmulAlgoCheck(handle_.get(), matmul_.get(), layouts.weight.get(),
                                              layouts.x.get(), layouts.out.get(), layouts.out.get(),
                                              &shared, &checked) == CUBLAS_STATUS_SUCCESS &&
                      checked.workspaceSize <= kWorkspaceBytes;
    if (fits) {
      check_cublas(matmul(shared), "cublasLtMatmul");
      return;
    }
  }
  check_cublas(matmul(algorithm(spec, num_tokens)), "cublasLtMatmul");
}

}  // namespace

std::unique_ptr<SegmentProvider> make_cublaslt_provider(Arena& arena, std::int64_t max_tokens) {
  return std::make_unique<CublasltProvider>(arena, max_tokens);
}

}  // namespace deltaflash::cuda
