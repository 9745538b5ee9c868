#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/src/detokenizer.h"
#include "runtime/src/stop_matcher.h"
#include "runtime/src/vocabulary.h"

namespace deltaflash {

struct TextStreamOptions {
  std::vector<std::string> stops = {};  // each non-empty UTF-8
  bool include_stop = false;            // the text ends with the stop, not before it
  bool skip_special_tokens = true;
  std::int64_t min_tokens = 0;  // a stop counts only where it lies wholly in later text, see push
};

/// The text of one sequence: takes the emitted tokens in turn, decodes them and looks for stop
/// strings. Text, token count and stop come from the same place, so they agree on the token that
/// ended the sequence even when one step of the model emits many.
///
/// Not for use by two threads at a time.
class TextStream {
 public:
  /// `vocabulary` must outlive this. Throws std::invalid_argument for a bad stop string.
  TextStream(const Vocabulary& vocabulary, TextStreamOptions options);

  /// Adds one token. Returns true if a stop string is complete, with this token or before;
  /// tokens after that are neither decoded nor counted. What the first `min_tokens` tokens make
  /// certain is released without a look for stops; a character that they leave incomplete is text
  /// of the token that completes it.
  bool push(std::int32_t token_id);

  /// The sequence ends here for another reason: releases what was held back. An incomplete
  /// character becomes U+FFFD, which may in turn complete a stop string that holds one: returns
  /// as `push` does. Nothing is to be pushed afterwards.
  bool finish();

  /// The text released since the last call, whole UTF-8 characters. Over a sequence these texts
  /// joined are its text: none comes twice.
  std::string take_text();

  /// Tokens pushed, up to and with the one in which the stop string was completed.
  std::int64_t num_tokens() const { return num_tokens_; }

  /// Of these, how many have had their text released, as far as there is any: the first ones. A
  /// token that begins a character counts once the token that completes it does. All after a stop
  /// and after `finish`.
  std::int64_t num_tokens_released() const {
    return num_tokens_ - static_cast<std::int64_t>(waiting_.size());
  }

  /// The bytes that a token gives to the text, valid as long as the vocabulary; none if hidden.
  std::string_view piece(std::int32_t token_id) const { return detokenizer_.piece(token_id); }

  bool stopped() const { return stopped_; }

  /// The stop string that ended the sequence.
  std::optional<std::string> matched_stop() const { return matcher_.matched_stop(); }

 private:
  /// A token whose text may not be out yet.
  struct Waiting {
    std::size_t bytes_end;                // bytes of the tokens up to it
    std::optional<std::size_t> text_end;  // where their text ends; absent while bytes are held
  };

  void count_released();

  Detokenizer detokenizer_;
  StopMatcher matcher_;
  std::int64_t min_tokens_;
  std::string piece_;     // decoded in one call; kept for its memory
  std::string released_;  // not taken yet
  std::int64_t num_tokens_ = 0;
  std::size_t num_bytes_ = 0;    // of the tokens pushed
  std::size_t num_decoded_ = 0;  // of the text that they are certain to be
  std::deque<Waiting> waiting_;
  bool stopped_ = false;
};

}  // namespace deltaflash
