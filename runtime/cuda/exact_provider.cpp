#include "runtime/cuda/exact_provider.h"

#include <string>

#include "plugins/common/error.h"
#include "plugins/linear/linear.h"

namespace deltaflash::cuda {
namespace {

class ExactLinear final : public Segment {
 public:
  explicit ExactLinear(const LinearSegment& spec) : spec_(spec) {}

  void launch(Stream stream, std::int64_t num_tokens, std::span<const void* const> inputs,
              std::span<void* const> outputs) override {
    linear({.x = static_cast<const float*>(inputs[0]),
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

class ExactProvider final : public SegmentProvider {
 public:
  std::string_view name() const override { return "exact"; }

  std::unique_ptr<Segment> make_linear(const LinearSegment& spec) override {
    if (spec.weight_dtype != DType::kBFloat16) {
      throw EngineError("segment " + spec.name + ": weight is " +
                        std::string(name_of(spec.weight_dtype)) +
                        ", the exact provider needs bfloat16");
    }
    return std::make_unique<ExactLinear>(spec);
  }
};

}  // namespace

std::unique_ptr<SegmentProvider> make_exact_provider() { return std::make_unique<ExactProvider>(); }

}  // namespace deltaflash::cuda
