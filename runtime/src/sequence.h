#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "plugins/common/slot_table.h"
#include "runtime/src/prompt_layout.h"
#include "runtime/src/text_stream.h"
#include "runtime/src/types.h"

namespace deltaflash {

enum class Stage : std::uint8_t {
  kQueued,    // waits for a slot and pages
  kPrefill,   // holds them; some of its prompt has not been launched
  kDecode,    // takes part in verify rounds
  kFinished,  // its final response is out; holds slot and pages until its last step is read
};

/// The host's view of one request. Owned by the loop thread once it is enqueued.
struct Sequence {
  Sequence(RequestId sequence_id, Request wanted, const Vocabulary& vocabulary,
           const TextStreamOptions& text_options)
      : id(sequence_id), request(std::move(wanted)), text(vocabulary, text_options) {}

  RequestId id;
  Request request;
  TextStream text;
  Stage stage = Stage::kQueued;
  std::vector<TokenId> end_ids;
  std::uint64_t seed = 0;
  std::int64_t max_tokens = 0;   // resolved: default, context and pool limits applied
  std::int64_t deadline_ns = 0;  // steady clock; 0 = none
  std::int32_t slot = -1;
  std::vector<std::int32_t> pages;
  std::int64_t num_passes = 0;     // times that a later request was admitted before this one
  std::int64_t num_prefilled = 0;  // prompt tokens launched
  std::int64_t num_emitted = 0;    // tokens read from the device and kept
  std::int32_t num_in_flight = 0;  // launched steps with a row of this sequence, not yet read
  std::int32_t num_sampling_in_flight = 0;  // of these, the ones that emit
  RequestStats stats;
  std::deque<TokenRecord> records;  // of tokens whose text is held back
  std::int64_t num_records_released = 0;
  LogitRows context_logits;
  LogitRows generation_logits;
  LogitRows image_embeddings;
  PromptLayout layout;  // empty without pictures
  // Of the pictures encoded so far, until the prompt is launched.
  std::vector<std::shared_ptr<const ImageEmbeddings>> embeddings;
  std::int64_t encoding_percent = -1;  // last reported

  /// Prompt tokens up to the first picture that is not encoded.
  std::int64_t num_ready_tokens() const {
    return embeddings.size() < layout.images.size() ? layout.images[embeddings.size()].first_token
                                                    : num_prompt_tokens();
  }

  std::int64_t num_prompt_tokens() const {
    return static_cast<std::int64_t>(request.input_token_ids.size());
  }
};

}  // namespace deltaflash
