#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace deltaflash {

/// What the token ids of a model stand for: a table id -> bytes, `vocab.bin` of the engine
/// directory. A token need not be whole UTF-8 characters; `Detokenizer` puts them together.
///
/// The file, all integers little endian, nothing between the parts and nothing behind the last:
///
///   char   magic[8]            "DFVOCAB1"
///   uint32 count               number of ids, < 2^31
///   uint32 offsets[count + 1]  token `id` is blob[offsets[id], offsets[id + 1]); offsets[0] is 0,
///                              offsets[count] the size of the blob
///   uint8  flags[count]        kSpecial | kUnused; other bits are 0
///   uint8  blob[]              the bytes of all tokens in the order of their ids
///
/// Ids are the rows of the model's output matrix. Rows that no token owns (padding of the matrix)
/// are marked unused and have no bytes.
///
/// Immutable once made, so any number of threads may read it.
class Vocabulary {
 public:
  static constexpr std::uint8_t kSpecial = 1;  // control token: end of turn, image pad, ...
  static constexpr std::uint8_t kUnused = 2;

  /// Reads `vocab.bin`. Throws EngineError if it cannot be read or is not as described above.
  explicit Vocabulary(const std::filesystem::path& path);

  /// The table of `tokens[id]`. Throws std::invalid_argument for an id outside of it and for an
  /// unused id with bytes.
  static Vocabulary from_tokens(std::span<const std::string> tokens,
                                std::span<const std::int32_t> special_ids,
                                std::span<const std::int32_t> unused_ids = {});

  std::size_t size() const { return flags_.size(); }

  /// The bytes of a token, valid as long as the table. Empty for an unused id and for one out of
  /// range: a model may produce either, and that must not end the request.
  std::string_view bytes(std::int32_t id) const {
    if (!contains(id)) {
      return {};
    }
    const auto row = static_cast<std::size_t>(id);
    return std::string_view(blob_).substr(offsets_[row], offsets_[row + 1] - offsets_[row]);
  }

  bool is_special(std::int32_t id) const { return has_flag(id, kSpecial); }

  /// True as well for an id out of range.
  bool is_unused(std::int32_t id) const { return !contains(id) || has_flag(id, kUnused); }

 private:
  Vocabulary() = default;

  bool contains(std::int32_t id) const {
    return id >= 0 && static_cast<std::size_t>(id) < flags_.size();
  }
  bool has_flag(std::int32_t id, std::uint8_t flag) const {
    return contains(id) && (flags_[static_cast<std::size_t>(id)] & flag) != 0;
  }

  std::vector<std::uint32_t> offsets_;  // [size() + 1]
  std::vector<std::uint8_t> flags_;     // [size()]
  std::string blob_;
};

}  // namespace deltaflash
