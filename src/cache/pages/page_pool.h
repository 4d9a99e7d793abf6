// cache/pages/page_pool.h: a fixed pool of equal pages of one plane, a free list, reference counts and marks.
//
// Invariants: a page is free iff refs == 0; slots [0, mark) of a page were handed out to some transaction, slots >= mark
// hold poison or garbage; a fresh page is poison (0xFF bytes, which decode to NaN in every format) in every slot. The pool
// never touches a page's bytes but for poison. Not thread safe: the owner's lock guards it. Spec: cache_core.md 3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"

namespace livequant {

struct PageMeta {
  uint32_t refs = 0;
  uint16_t mark = 0;
};

class PagePool {
 public:
  // `pages` pages of `page_bytes` bytes with `rows` row slots each. page_bytes 0 makes a pool of pages without memory (tests
  // of the state machine). kOutOfRange: more than 2^32 - 1 pages, or the memory cannot be mapped (both numbers named).
  static Result<std::unique_ptr<PagePool>> Create(int64_t pages, int64_t page_bytes, int rows);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  int64_t capacity() const { return static_cast<int64_t>(meta_.size()); }
  int64_t free_pages() const { return static_cast<int64_t>(free_.size()); }
  int64_t used_pages() const { return capacity() - free_pages(); }
  int64_t page_bytes() const { return page_bytes_; }
  int rows() const { return rows_; }
  // Pages handed out times their allocated size: knows neither ledger nor census.
  int64_t used_bytes() const { return used_pages() * page_bytes_; }

  // REQUIRES free_pages() > 0. A poisoned page with one reference and mark 0.
  uint32_t Take();
  void Ref(uint32_t page);
  // Frees the page when the last reference goes.
  void Unref(uint32_t page);
  const PageMeta& meta(uint32_t page) const { return meta_[page]; }
  void set_mark(uint32_t page, uint16_t mark);

  std::byte* base() const { return base_; }
  std::byte* data(uint32_t page) const { return base_ + page * page_bytes_; }

 private:
  PagePool() = default;
  std::byte* base_ = nullptr;
  int64_t mapped_bytes_ = 0, page_bytes_ = 0;
  int rows_ = 0;
  std::vector<PageMeta> meta_;
  std::vector<uint32_t> free_;  // a stack, filled at start
};

}  // namespace livequant
