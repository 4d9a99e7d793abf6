// cache/pages/page_pool.h: a fixed pool of equal pages of one plane, a free list, reference counts and marks.
//
// Invariants: a page is free iff refs == 0; slots [0, mark) of a page were handed out to some transaction, slots >=
// mark hold poison or garbage. A page that was just taken holds whatever its last owner left until Poison() fills every
// slot with 0xFF bytes, which decode to NaN in every format. The pool touches a page's bytes in Poison() alone, and
// memory that no page ever used is never resident. Not thread safe but for Poison() and data(): the owner's lock guards
// it. Spec: cache_core.md 3.
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
  // `pages` pages of `page_bytes` bytes with `rows` row slots each; allocate false makes a pool of pages without
  // memory, which counts the same bytes (tests of the state machine). kInvalidArgument: a negative number, or rows
  // outside 1..65535 (a mark has 16 bits). kOutOfRange: more than 2^32 - 2 pages, or the memory cannot be mapped (pages
  // and bytes are named).
  // `memory`: the caller's, of at least pages * page_bytes bytes, to outlive the pool; null: the pool maps its own.
  static Result<std::unique_ptr<PagePool>> Create(int64_t pages, int64_t page_bytes, int rows, bool allocate = true,
                                                  std::byte* memory = nullptr);
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

  // REQUIRES free_pages() > 0. A page with one reference and mark 0; its bytes are not touched.
  uint32_t Take();
  // REQUIRES a used page.
  void Ref(uint32_t page);
  // Frees the page when the last reference goes. REQUIRES a used page.
  void Unref(uint32_t page);
  const PageMeta& meta(uint32_t page) const { return meta_[page]; }
  // REQUIRES mark <= rows().
  void set_mark(uint32_t page, int mark);
  // Fills the page with 0xFF. Only for a page that nobody else can see; needs no lock.
  void Poison(uint32_t page);

  // Null for a pool without memory.
  std::byte* base() const { return base_; }
  std::byte* data(uint32_t page) const { return base_ + int64_t{page} * page_bytes_; }

 private:
  PagePool() = default;
  std::byte* base_ = nullptr;
  int64_t mapped_bytes_ = 0, page_bytes_ = 0;  // mapped_bytes_ 0: base_ is not ours
  int rows_ = 0;
  std::vector<PageMeta> meta_;
  std::vector<uint32_t> free_;  // a stack, filled at start
};

}  // namespace livequant
