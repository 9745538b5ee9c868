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
  num_bytes_ += piece(token_id).size();
  piece_.clear();
  detokenizer_.append(token_id, piece_);
  num_decoded_ += piece_.size();
  if (num_tokens_ <= min_tokens_) {
    released_ += piece_;
  } else {
    stopped_ = matcher_.push(piece_, released_);
  }
  waiting_.push_back({.bytes_end = num_bytes_, .text_end = std::nullopt});
  count_released();
  return stopped_;
}

bool TextStream::finish() {
  if (stopped_) {
    return true;
  }
  piece_.clear();
  detokenizer_.finish(piece_);
  if (num_tokens_ <= min_tokens_) {
    released_ += piece_;
  } else {
    stopped_ = matcher_.push(piece_, released_);
    matcher_.finish(released_);
  }
  waiting_.clear();
  return stopped_;
}

void TextStream::count_released() {
  const std::size_t bytes_decoded = num_bytes_ - detokenizer_.num_held();
  for (auto token = waiting_.rbegin(); token != waiting_.rend() && !token->text_end; ++token) {
    if (token->bytes_end <= bytes_decoded) {
      token->text_end = num_decoded_;
    }
  }
  const std::size_t text_released = num_decoded_ - matcher_.held().size();
  while (!waiting_.empty() &&
         (stopped_ || waiting_.front().text_end.value_or(text_released + 1) <= text_released)) {
    waiting_.pop_front();
  }
}

std::string TextStream::take_text() { return std::exchange(released_, {}); }

}  // namespace deltaflash
