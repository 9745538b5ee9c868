#include "runtime/src/utf8_decoder.h"

namespace deltaflash {

namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD

}  // namespace

void Utf8Decoder::append(std::string_view bytes, std::string& out) {
  for (const char byte : bytes) {
    append(static_cast<std::uint8_t>(byte), out);
  }
}

void Utf8Decoder::append(std::uint8_t byte, std::string& out) {
  if (num_missing_ == 0) {
    begin(byte, out);
    return;
  }
  if (byte < low_ || byte > high_) {
    finish(out);
    begin(byte, out);
    return;
  }
  held_[num_held_++] = static_cast<char>(byte);
  low_ = 0x80;
  high_ = 0xBF;
  if (--num_missing_ == 0) {
    out.append(held_.data(), num_held_);
  }
}

// The first byte of a sequence bounds the second (The Unicode Standard, table 3-7): this shuts out
// overlong forms, surrogates and what lies above U+10FFFF.
void Utf8Decoder::begin(std::uint8_t byte, std::string& out) {
  if (byte < 0x80) {
    out.push_back(static_cast<char>(byte));
  } else if (byte >= 0xC2 && byte <= 0xDF) {
    expect(byte, 1, 0x80, 0xBF);
  } else if (byte >= 0xE0 && byte <= 0xEF) {
    expect(byte, 2, byte == 0xE0 ? 0xA0 : 0x80, byte == 0xED ? 0x9F : 0xBF);
  } else if (byte >= 0xF0 && byte <= 0xF4) {
    expect(byte, 3, byte == 0xF0 ? 0x90 : 0x80, byte == 0xF4 ? 0x8F : 0xBF);
  } else {
    out.append(kReplacement);
  }
}

void Utf8Decoder::expect(std::uint8_t lead, int num_missing, std::uint8_t low, std::uint8_t high) {
  held_[0] = static_cast<char>(lead);
  num_held_ = 1;
  num_missing_ = num_missing;
  low_ = low;
  high_ = high;
}

void Utf8Decoder::finish(std::string& out) {
  if (num_missing_ != 0) {
    out.append(kReplacement);
    num_missing_ = 0;
  }
}

bool is_valid_utf8(std::string_view text) {
  Utf8Decoder decoder;
  std::string decoded;
  decoder.append(text, decoded);
  decoder.finish(decoded);
  return decoded == text;  // only valid text decodes to itself
}

}  // namespace deltaflash
