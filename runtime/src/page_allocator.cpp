#include "runtime/src/page_allocator.h"

#include <cassert>

namespace deltaflash {

PageAllocator::PageAllocator(std::int64_t num_pages, std::int64_t page_size)
    : num_pages_(num_pages), page_size_(page_size) {
  free_.reserve(static_cast<std::size_t>(num_pages));
  for (std::int64_t page = num_pages - 1; page >= 0; --page) {
    free_.push_back(static_cast<std::int32_t>(page));
  }
}

std::vector<std::int32_t> PageAllocator::take(std::int64_t count) {
  assert(count <= num_free());
  const auto first = free_.end() - static_cast<std::ptrdiff_t>(count);
  std::vector<std::int32_t> pages(first, free_.end());
  free_.erase(first, free_.end());
  return pages;
}

void PageAllocator::give_back(const std::vector<std::int32_t>& pages) {
  free_.insert(free_.end(), pages.begin(), pages.end());
  assert(num_free() <= num_pages_);
}

}  // namespace deltaflash
