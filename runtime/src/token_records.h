#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/src/model_runner.h"
#include "runtime/src/sequence.h"
#include "runtime/src/types.h"
#include "runtime/src/vocabulary.h"

namespace deltaflash {

/// The record of the token in place `at` of a step's [num_rows, max_emitted].
TokenRecord token_record(const Sequence& sequence, const Vocabulary& vocabulary,
                         const StepResult& result, std::size_t at);

/// Moves the first `count` records that wait in the sequence into the response.
void release_records(Sequence& sequence, std::int64_t count, Response& response);

}  // namespace deltaflash
