#include "plugins/embedding/embedding.h"

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

void embedding(const Array<const std::int32_t, 1>& ids, const Array<const std::uint16_t, 2>& table,
               const Array<float, 2>& out, ThreadPool* pool) {
  const auto num_tokens = static_cast<std::int64_t>(ids.shape(0));
  const auto hidden = static_cast<std::int64_t>(table.shape(1));
  check_shape("embedding", "out", out, {num_tokens, hidden});
  cpu::embedding({.ids = ids.data(),
                  .table = reinterpret_cast<const BFloat16*>(table.data()),
                  .out = out.data(),
                  .num_tokens = num_tokens,
                  .vocab_size = static_cast<std::int64_t>(table.shape(0)),
                  .hidden = hidden,
                  .dtype = DType::kFloat32},
                 stream_of(pool));
}

}  // namespace

void bind_embedding(nb::module_& plugins) {
  plugins.def("embedding", &embedding, nb::arg("ids"), nb::arg("table"), nb::arg("out"),
              nb::arg("pool") = nb::none(), nb::call_guard<nb::gil_scoped_release>(),
              "Rows of the embedding table, bfloat16 bits [vocab_size, hidden], into `out`\n"
              "[num_tokens, hidden]; zeros for an id outside the table.");
}

}  // namespace deltaflash
