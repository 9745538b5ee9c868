#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace deltaflash {

/// Turns a stream of arbitrary bytes into valid UTF-8. A sequence that is still incomplete is held
/// back, at most 3 bytes. What can never become a character is replaced by U+FFFD, one for each
/// maximal subpart (The Unicode Standard, 3.9 "U+FFFD Substitution of Maximal Subparts"), so that
/// the text of all calls together is what Python's `bytes.decode("utf-8", errors="replace")` makes
/// of all bytes together, wherever the pieces are cut.
class Utf8Decoder {
 public:
  /// Appends to `out` the text that is certain with these bytes.
  void append(std::string_view bytes, std::string& out);

  /// The bytes have ended: a held back sequence becomes one U+FFFD. Ready for other bytes then.
  void finish(std::string& out);

  /// Bytes that are held back.
  std::size_t num_held() const { return num_missing_ == 0 ? 0 : num_held_; }

 private:
  void append(std::uint8_t byte, std::string& out);
  void begin(std::uint8_t byte, std::string& out);
  void expect(std::uint8_t lead, int num_missing, std::uint8_t low, std::uint8_t high);

  std::array<char, 4> held_{};
  std::size_t num_held_ = 0;
  int num_missing_ = 0;   // bytes that the held sequence still needs; 0 = nothing is held
  std::uint8_t low_ = 0;  // the next byte is in [low_, high_], or the sequence is ill-formed
  std::uint8_t high_ = 0;
};

/// True if `text` is valid UTF-8 and ends with a whole character.
bool is_valid_utf8(std::string_view text);

}  // namespace deltaflash
