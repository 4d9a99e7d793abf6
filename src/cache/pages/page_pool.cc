#include "cache/pages/page_pool.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <string>

#include "base/check.h"

namespace livequant {

Result<std::unique_ptr<PagePool>> PagePool::Create(int64_t pages, int64_t page_bytes, int rows, bool allocate,
                                                   std::byte* memory) {
  if (pages < 0 || page_bytes < 0)
    return Status(Code::kInvalidArgument,
                  "page pool: " + std::to_string(pages) + " pages of " + std::to_string(page_bytes) + " bytes");
  if (rows < 1 || rows > std::numeric_limits<uint16_t>::max())
    return Status(Code::kInvalidArgument, "page pool: " + std::to_string(rows) + " rows a page, limit 1..65535");
  const std::string size = std::to_string(pages) + " pages of " + std::to_string(page_bytes) + " bytes";
  if (pages > int64_t{std::numeric_limits<uint32_t>::max()} - 1)
    return Status(Code::kOutOfRange, "page pool: " + size + ", limit 4294967294 pages");
  if (page_bytes > 0 && pages > std::numeric_limits<int64_t>::max() / page_bytes)
    return Status(Code::kOutOfRange, "page pool: " + size + " exceed 2^63 bytes");

  std::unique_ptr<PagePool> pool(new PagePool);
  pool->page_bytes_ = page_bytes;
  pool->rows_ = rows;
  if (memory != nullptr) {
    pool->base_ = memory;
  } else if (allocate && pages > 0 && page_bytes > 0) {
    const int64_t bytes = pages * page_bytes;
    // Not reserved and not touched: a page becomes resident when it is first used.
    void* mapped = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED)
      return Status(Code::kOutOfRange,
                    "page pool: cannot map " + size + " (" + std::to_string(bytes) + "): " + std::strerror(errno));
    pool->base_ = static_cast<std::byte*>(mapped);
    pool->mapped_bytes_ = bytes;
  }
  pool->meta_.resize(static_cast<size_t>(pages));
  pool->free_.resize(static_cast<size_t>(pages));
  for (int64_t i = 0; i < pages; ++i) pool->free_[static_cast<size_t>(i)] = static_cast<uint32_t>(pages - 1 - i);
  return pool;
}

PagePool::~PagePool() {
  if (mapped_bytes_ > 0) munmap(base_, static_cast<size_t>(mapped_bytes_));
}

uint32_t PagePool::Take() {
  LQ_CHECK(!free_.empty());
  const uint32_t page = free_.back();
  free_.pop_back();
  LQ_CHECK(meta_[page].refs == 0);
  meta_[page] = {.refs = 1, .mark = 0};
  return page;
}

void PagePool::Ref(uint32_t page) {
  LQ_CHECK(page < meta_.size() && meta_[page].refs > 0);
  ++meta_[page].refs;
}

void PagePool::Unref(uint32_t page) {
  LQ_CHECK(page < meta_.size() && meta_[page].refs > 0);
  if (--meta_[page].refs == 0) free_.push_back(page);  // within the capacity that Create filled: no allocation
}

void PagePool::set_mark(uint32_t page, int mark) {
  LQ_CHECK(mark >= 0 && mark <= rows_ && meta_[page].refs > 0);
  meta_[page].mark = static_cast<uint16_t>(mark);
}

void PagePool::Poison(uint32_t page) {
  if (base_ != nullptr) std::memset(data(page), 0xFF, static_cast<size_t>(page_bytes_));
}

}  // namespace livequant
