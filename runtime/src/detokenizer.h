#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "runtime/src/utf8_decoder.h"
#include "runtime/src/vocabulary.h"

namespace deltaflash {

/// The text of one sequence, token by token. What all calls append is, joined, the decoding of the
/// bytes of the shown tokens put together: in Python
///
///   b"".join(vocabulary.token_bytes(id) for id in shown).decode("utf-8", errors="replace")
///
/// `shown` leaves out special tokens unless they were asked for. A hidden token is as if it had
/// not been there: it does not end a character whose first bytes came before it. Each call by
/// itself appends whole characters only, so streamed and collected text come out of one path.
class Detokenizer {
 public:
  /// `vocabulary` must outlive this.
  explicit Detokenizer(const Vocabulary& vocabulary, bool skip_special_tokens = true)
      : vocabulary_(&vocabulary), skip_special_tokens_(skip_special_tokens) {}

  /// Adds one token and appends to `out` the text that is certain with it. Any id is accepted.
  void append(std::int32_t id, std::string& out);

  /// The sequence has ended: an incomplete character becomes U+FFFD. Ready for another sequence.
  void finish(std::string& out) { decoder_.finish(out); }

  /// The bytes that a token gives to the text: none if it is hidden.
  std::string_view piece(std::int32_t id) const {
    return skip_special_tokens_ && vocabulary_->is_special(id) ? std::string_view{}
                                                               : vocabulary_->bytes(id);
  }

  /// Bytes of an incomplete character.
  std::size_t num_held() const { return decoder_.num_held(); }

 private:
  const Vocabulary* vocabulary_;
  bool skip_special_tokens_;
  Utf8Decoder decoder_;
};

}  // namespace deltaflash
