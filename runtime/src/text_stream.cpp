#include "runtime/src/text_stream.h"

#include <utility>

namespace deltaflash {

TextStream::TextStream(const Vocabulary& vocabulary, TextStreamOptions options)
    : detokenizer_(vocabulary, options.skip_special_tokens),
      matcher_(std::move(options.stops), options.include_stop),
      min_tokens_(options.min_tokens) {}

bool TextStream::push(std::int32_t token_id) {
  if (stopped_) {
    return true;
  }
  ++num_tokens_;
  if (num_tokens_ <= min_tokens_) {
    detokenizer_.append(token_id, released_);
    return false;
  }
  piece_.clear();
  detokenizer_.append(token_id, piece_);
  stopped_ = matcher_.push(piece_, released_);
  return stopped_;
}

bool TextStream::finish() {
  if (stopped_) {
    return true;
  }
  if (num_tokens_ <= min_tokens_) {
    detokenizer_.finish(released_);
    return false;
  }
  piece_.clear();
  detokenizer_.finish(piece_);
  stopped_ = matcher_.push(piece_, released_);
  matcher_.finish(released_);
  return stopped_;
}

std::string TextStream::take_text() { return std::exchange(released_, {}); }

}  // namespace deltaflash
