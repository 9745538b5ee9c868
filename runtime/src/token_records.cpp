#include "runtime/src/token_records.h"

#include <optional>
#include <string>
#include <utility>

namespace deltaflash {

TokenRecord token_record(const Sequence& sequence, const Vocabulary& vocabulary,
                         const StepResult& result, std::size_t at) {
  const TokenId id = result.tokens[at];
  TokenRecord record{.id = id,
                     .piece = std::string(sequence.text.piece(id)),
                     .logprob = std::nullopt,
                     .rank = std::nullopt,
                     .candidates = {}};
  if (const auto count = sequence.request.output.top_logprobs) {
    record.logprob = result.logprob[at];
    record.rank = result.rank[at];
    const std::size_t first = at * kMaxTopLogprobs;
    for (std::size_t i = first; i < first + static_cast<std::size_t>(*count); ++i) {
      const TokenId candidate = result.top_ids[i];
      record.candidates.push_back({.id = candidate,
                                   .piece = std::string(vocabulary.bytes(candidate)),
                                   .logprob = result.top_logprobs[i]});
    }
  }
  return record;
}

void release_records(Sequence& sequence, std::int64_t count, Response& response) {
  for (; count > 0; --count) {
    response.records.push_back(std::move(sequence.records.front()));
    sequence.records.pop_front();
    ++sequence.num_records_released;
  }
}

}  // namespace deltaflash
