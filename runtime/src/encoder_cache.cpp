#include "runtime/src/encoder_cache.h"

namespace deltaflash {

std::string EncoderCache::key_of(const Image& image) const {
  if (budget_bytes_ == 0 || image.digest.empty()) {
    return {};
  }
  return std::to_string(image.height) + "x" + std::to_string(image.width) + ":" + image.digest;
}

std::shared_ptr<const ImageEmbeddings> EncoderCache::find(const Image& image) {
  const std::string key = key_of(image);
  if (key.empty()) {
    return nullptr;
  }
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) {
    ++num_misses_;
    return nullptr;
  }
  ++num_hits_;
  entries_.splice(entries_.begin(), entries_, found->second);
  return found->second->second;
}

void EncoderCache::add(const Image& image, std::shared_ptr<const ImageEmbeddings> embeddings) {
  const std::string key = key_of(image);
  const auto bytes = static_cast<std::int64_t>(embeddings->num_bytes());
  if (key.empty() || bytes > budget_bytes_ || by_key_.contains(key)) {
    return;
  }
  while (num_bytes_ + bytes > budget_bytes_) {
    num_bytes_ -= static_cast<std::int64_t>(entries_.back().second->num_bytes());
    by_key_.erase(entries_.back().first);
    entries_.pop_back();
  }
  entries_.emplace_front(key, std::move(embeddings));
  by_key_.emplace(key, entries_.begin());
  num_bytes_ += bytes;
}

}  // namespace deltaflash
