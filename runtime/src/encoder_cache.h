#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "runtime/src/image.h"

namespace deltaflash {

/// Encoded pictures by digest, within a budget of bytes: the least recently used go first. One
/// thread uses it.
class EncoderCache {
 public:
  /// A budget of 0 bytes turns the cache off.
  explicit EncoderCache(std::int64_t budget_bytes) : budget_bytes_(budget_bytes) {}

  /// Null if it is not held, or has no digest.
  std::shared_ptr<const ImageEmbeddings> find(const Image& image);

  /// Does nothing for a picture without a digest, or larger than the budget.
  void add(const Image& image, std::shared_ptr<const ImageEmbeddings> embeddings);

  std::int64_t num_bytes() const { return num_bytes_; }
  std::int64_t num_hits() const { return num_hits_; }
  std::int64_t num_misses() const { return num_misses_; }

 private:
  using Entry = std::pair<std::string, std::shared_ptr<const ImageEmbeddings>>;

  /// Empty if the cache cannot hold the picture. Equal pixels of another shape are another picture.
  std::string key_of(const Image& image) const;

  std::int64_t budget_bytes_;
  std::int64_t num_bytes_ = 0;
  std::int64_t num_hits_ = 0;
  std::int64_t num_misses_ = 0;
  std::list<Entry> entries_;  // most recently used first
  std::unordered_map<std::string, std::list<Entry>::iterator> by_key_;
};

}  // namespace deltaflash
