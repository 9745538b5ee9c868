#pragma once

#include <cstdint>
#include <vector>

namespace deltaflash {

/// The free pages of the KV pool. Pages are handed out whole at admission and never taken back
/// before the sequence ends (guaranteed no eviction).
class PageAllocator {
 public:
  PageAllocator(std::int64_t num_pages, std::int64_t page_size);

  std::int64_t num_pages() const { return num_pages_; }
  std::int64_t num_free() const { return static_cast<std::int64_t>(free_.size()); }
  std::int64_t page_size() const { return page_size_; }

  /// Pages that hold `num_tokens` tokens.
  std::int64_t pages_for(std::int64_t num_tokens) const {
    return (num_tokens + page_size_ - 1) / page_size_;
  }

  /// Takes `count` pages; `count` <= num_free().
  std::vector<std::int32_t> take(std::int64_t count);
  void give_back(const std::vector<std::int32_t>& pages);

 private:
  std::int64_t num_pages_;
  std::int64_t page_size_;
  std::vector<std::int32_t> free_;
};

}  // namespace deltaflash
