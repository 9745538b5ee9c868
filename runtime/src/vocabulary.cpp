#include "runtime/src/vocabulary.h"

#include <fstream>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "plugins/common/error.h"

namespace deltaflash {

namespace {

constexpr std::string_view kMagic = "DFVOCAB1";
constexpr std::size_t kHeaderBytes = 12;  // magic and count
constexpr std::uint32_t kMaxCount = std::numeric_limits<std::int32_t>::max();
constexpr unsigned kKnownFlags = unsigned{Vocabulary::kSpecial} | unsigned{Vocabulary::kUnused};

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& what) {
  throw EngineError("vocabulary " + path.string() + ": " + what);
}

std::string read_file(const std::filesystem::path& path) {
  std::error_code error;
  const std::uintmax_t num_bytes = std::filesystem::file_size(path, error);
  if (error) {
    refuse(path, error.message());
  }
  std::string content(num_bytes, '\0');
  std::ifstream file(path, std::ios::binary);
  if (!file.read(content.data(), static_cast<std::streamsize>(num_bytes))) {
    refuse(path, "cannot read its " + std::to_string(num_bytes) + " bytes");
  }
  return content;
}

std::uint32_t uint32_at(std::string_view content, std::size_t position) {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < sizeof(value); ++i) {
    value |= std::uint32_t{static_cast<unsigned char>(content[position + i])} << (8 * i);
  }
  return value;
}

// An unused id has no bytes, whichever way the table is made.
std::string describe_unused(std::size_t id, std::size_t num_bytes) {
  return "unused id " + std::to_string(id) + " must have no bytes, has " +
         std::to_string(num_bytes);
}

}  // namespace

Vocabulary::Vocabulary(const std::filesystem::path& path) {
  std::string content = read_file(path);
  if (content.size() < kHeaderBytes) {
    refuse(path, "expected at least " + std::to_string(kHeaderBytes) + " bytes, found " +
                     std::to_string(content.size()));
  }
  if (!content.starts_with(kMagic)) {
    refuse(path, "expected to begin with " + std::string(kMagic));
  }
  const std::uint32_t count = uint32_at(content, kMagic.size());
  if (count > kMaxCount) {
    refuse(path, "expected at most " + std::to_string(kMaxCount) + " ids, found " +
                     std::to_string(count));
  }
  const std::uint64_t flags_begin = kHeaderBytes + 4 * (std::uint64_t{count} + 1);
  const std::uint64_t blob_begin = flags_begin + count;
  if (content.size() < blob_begin) {
    refuse(path, std::to_string(count) + " ids need at least " + std::to_string(blob_begin) +
                     " bytes, found " + std::to_string(content.size()));
  }

  offsets_.reserve(std::size_t{count} + 1);
  for (std::size_t row = 0; row <= count; ++row) {
    offsets_.push_back(uint32_at(content, kHeaderBytes + 4 * row));
  }
  if (offsets_.front() != 0) {
    refuse(path, "expected offset 0 of id 0, found " + std::to_string(offsets_.front()));
  }
  for (std::size_t id = 0; id < count; ++id) {
    if (offsets_[id + 1] < offsets_[id]) {
      refuse(path, "offsets out of order: id " + std::to_string(id) + " begins at " +
                       std::to_string(offsets_[id]) + " and ends at " +
                       std::to_string(offsets_[id + 1]));
    }
  }
  if (content.size() - blob_begin != offsets_.back()) {
    refuse(path, "offsets end at byte " + std::to_string(offsets_.back()) + " of a blob of " +
                     std::to_string(content.size() - blob_begin) + " bytes");
  }

  flags_.reserve(count);
  for (std::size_t id = 0; id < count; ++id) {
    const auto flags = static_cast<std::uint8_t>(content[flags_begin + id]);
    if ((flags & ~kKnownFlags) != 0) {
      refuse(path, "unknown flags " + std::to_string(flags) + " of id " + std::to_string(id));
    }
    if ((flags & kUnused) != 0 && offsets_[id + 1] != offsets_[id]) {
      refuse(path, describe_unused(id, offsets_[id + 1] - offsets_[id]));
    }
    flags_.push_back(flags);
  }
  content.erase(0, blob_begin);
  blob_ = std::move(content);
}

Vocabulary Vocabulary::from_tokens(std::span<const std::string> tokens,
                                   std::span<const std::int32_t> special_ids,
                                   std::span<const std::int32_t> unused_ids) {
  if (tokens.size() > kMaxCount) {
    throw std::invalid_argument("vocabulary: at most " + std::to_string(kMaxCount) +
                                " tokens, got " + std::to_string(tokens.size()));
  }
  Vocabulary vocabulary;
  vocabulary.flags_.resize(tokens.size());
  vocabulary.offsets_.reserve(tokens.size() + 1);
  vocabulary.offsets_.push_back(0);
  for (const std::string& token : tokens) {
    vocabulary.blob_ += token;
    if (vocabulary.blob_.size() > std::numeric_limits<std::uint32_t>::max()) {
      throw std::invalid_argument("vocabulary: the tokens are longer than 4 GiB together");
    }
    vocabulary.offsets_.push_back(static_cast<std::uint32_t>(vocabulary.blob_.size()));
  }
  const auto mark = [&](std::span<const std::int32_t> ids, std::uint8_t flag) {
    for (const std::int32_t id : ids) {
      if (!vocabulary.contains(id)) {
        throw std::invalid_argument("vocabulary: id " + std::to_string(id) + " is not one of " +
                                    std::to_string(tokens.size()) + " tokens");
      }
      vocabulary.flags_[static_cast<std::size_t>(id)] |= flag;
    }
  };
  mark(special_ids, kSpecial);
  mark(unused_ids, kUnused);
  for (const std::int32_t id : unused_ids) {
    if (!vocabulary.bytes(id).empty()) {
      throw std::invalid_argument("vocabulary: " + describe_unused(static_cast<std::size_t>(id),
                                                                   vocabulary.bytes(id).size()));
    }
  }
  return vocabulary;
}

}  // namespace deltaflash
