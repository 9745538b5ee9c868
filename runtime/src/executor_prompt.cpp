// What happens to a prompt before its first token: pictures are encoded, pieces are launched, and
// whoever asked for it is told.

#include <utility>

#include "runtime/src/clock.h"
#include "runtime/src/executor.h"

namespace deltaflash {

void Executor::encode(std::int64_t budget_ns) {
  const std::int64_t begin = now_ns();
  if (const SequencePtr sequence = vision_->advance(budget_ns)) {
    const double fraction = vision_->fraction(*sequence);
    const auto percent = static_cast<std::int64_t>(100 * fraction);
    if (percent > std::exchange(sequence->encoding_percent, percent)) {
      show_progress(*sequence, ProgressPhase::kEncoding, fraction);
    }
  }
  current_.vision_ns = now_ns() - begin;
}

/// After a piece of a prompt.
void Executor::prompt_launched(Sequence& sequence) {
  if (sequence.num_ready_tokens() == sequence.num_prompt_tokens()) {  // no step back to kEncoding
    show_progress(sequence, ProgressPhase::kPrefill,
                  static_cast<double>(sequence.num_prefilled) /
                      static_cast<double>(sequence.num_prompt_tokens()));
  }
  if (sequence.stage != Stage::kDecode) {
    return;
  }
  if (sequence.request.output.return_image_embeddings) {
    for (const auto& rows : sequence.embeddings) {
      LogitRows& all = sequence.image_embeddings;
      all.values.insert(all.values.end(), rows->values.get(),
                        rows->values.get() + rows->num_tokens * rows->width);
      all.num_rows += rows->num_tokens;
    }
  }
  sequence.embeddings.clear();
}

void Executor::show_progress(const Sequence& sequence, ProgressPhase phase,
                             std::optional<double> fraction) {
  if (!sequence.request.return_progress) {
    return;
  }
  Response response;
  response.request_id = sequence.id;
  response.num_prompt_tokens = sequence.num_prompt_tokens();
  response.num_completion_tokens = sequence.num_emitted;
  response.stats = sequence.stats;
  response.progress = Progress{.phase = phase, .fraction = fraction};
  responses_.push(std::move(response));
}

}  // namespace deltaflash
