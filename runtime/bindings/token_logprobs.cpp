#include "plugins/token_logprobs/token_logprobs.h"

#include <limits>
#include <string>

#include "runtime/bindings/array.h"
#include "runtime/bindings/bindings.h"
#include "runtime/bindings/slot_table.h"

namespace nb = nanobind;

namespace deltaflash {
namespace {

constexpr const char* kOp = "token_logprobs";

void token_logprobs(const Array<const float, 2>& logits, SlotTable table,
                    const Array<const std::int32_t, 1>& slots,
                    const Array<const std::int32_t, 1>& row_start,
                    const Array<const std::int32_t, 1>& sample_start,
                    const Array<const std::int32_t, 2>& tokens,
                    const Array<const std::int32_t, 1>& num_emitted, const Array<float, 2>& logprob,
                    const Array<std::int32_t, 2>& rank, const Array<std::int32_t, 3>& top_ids,
                    const Array<float, 3>& top_logprobs, ThreadPool* pool) {
  const auto num_rows = static_cast<std::int64_t>(slots.shape(0));
  const auto num_logits = static_cast<std::int64_t>(logits.shape(0));
  const auto vocab_size = static_cast<std::int64_t>(logits.shape(1));
  const auto max_emitted = static_cast<std::int64_t>(tokens.shape(1));
  check_argument(max_emitted > 0, kOp, "expected tokens of at least one column, found none");
  check_shape(kOp, "tokens", tokens, {num_rows, max_emitted});
  check_shape(kOp, "sample_start", sample_start, {num_rows});
  check_shape(kOp, "num_emitted", num_emitted, {num_rows});
  check_shape(kOp, "logprob", logprob, {num_rows, max_emitted});
  check_shape(kOp, "rank", rank, {num_rows, max_emitted});
  check_shape(kOp, "top_ids", top_ids, {num_rows, max_emitted, kMaxTopLogprobs});
  check_shape(kOp, "top_logprobs", top_logprobs, {num_rows, max_emitted, kMaxTopLogprobs});
  constexpr std::int64_t kAnyTokens = std::numeric_limits<std::int32_t>::max();
  const RowBatch rows = row_batch(kOp, slots, row_start, kAnyTokens, table.num_slots);
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const std::int64_t emitted = num_emitted.data()[row];
    if (rows.slots[row] < 0 || emitted <= 0) {
      continue;
    }
    check_argument(emitted <= max_emitted, kOp,
                   "expected num_emitted of at most " + std::to_string(max_emitted) + ", found " +
                       std::to_string(emitted) + " in row " + std::to_string(row));
    const std::int64_t start = sample_start.data()[row];
    check_argument(start >= 0 && start + emitted <= num_logits, kOp,
                   "expected logits rows in [0, " + std::to_string(num_logits) + "), found " +
                       std::to_string(start) + " and " + std::to_string(emitted) +
                       " emitted in row " + std::to_string(row));
    for (std::int64_t i = 0; i < emitted; ++i) {
      const std::int64_t token = tokens.data()[row * max_emitted + i];
      check_argument(token >= 0 && token < vocab_size, kOp,
                     "expected tokens in [0, " + std::to_string(vocab_size) + "), found " +
                         std::to_string(token) + " in row " + std::to_string(row));
    }
  }
  cpu::token_logprobs({.logits = logits.data(),
                       .vocab_size = vocab_size,
                       .table = table.states(kOp),
                       .rows = rows,
                       .sample_start = sample_start.data(),
                       .tokens = tokens.data(),
                       .num_emitted = num_emitted.data(),
                       .max_emitted = max_emitted,
                       .logprob = logprob.data(),
                       .rank = rank.data(),
                       .top_ids = top_ids.data(),
                       .top_logprobs = top_logprobs.data()},
                      stream_of(pool));
}

}  // namespace

void bind_token_logprobs(nb::module_& plugins) {
  plugins.def(kOp, &token_logprobs, nb::arg("logits"), nb::arg("table"), nb::arg("slots"),
              nb::arg("row_start"), nb::arg("sample_start"), nb::arg("tokens"),
              nb::arg("num_emitted"), nb::arg("logprob"), nb::arg("rank"), nb::arg("top_ids"),
              nb::arg("top_logprobs"), nb::arg("pool") = nb::none(),
              nb::call_guard<nb::gil_scoped_release>(),
              "How likely `logits` [num_logits, vocab_size] make each emitted token of the rows\n"
              "whose slot asks for it: `logprob` and `rank` [num_rows, max_emitted], and what is\n"
              "likeliest: `top_ids` and `top_logprobs` [num_rows, max_emitted, MAX_TOP_LOGPROBS].");
}

}  // namespace deltaflash
