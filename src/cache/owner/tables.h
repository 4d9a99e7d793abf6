// cache/owner/tables.h: page tables as persistent lists. A table is a root of blocks of 64 entries; neither a root nor
// a block changes once it is built, so views share them, and a change copies one root (fixed size) and the blocks after
// the kept prefix.
//
// Invariants: a block holds one reference to each page in it, a root one to each of its blocks, whoever names a root
// one to it; all blocks of a root but the last are full. Root 0 is the empty table: it has no references and is never
// freed. Capacity is fixed at Create; memory of nodes that were never used is not resident. Not thread safe: the
// owner's lock guards it, but entries of a root that a reader holds may be read without the lock. Spec: cache_core.md
// 3, "Tables are persistent".
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "cache/pages/page_pool.h"
#include "schema/cache_view.h"

namespace livequant {

using RootId = uint32_t;
inline constexpr RootId kEmptyTable = 0;

class PageTables {
 public:
  // pools[plane] owns the pages of the tables of that plane; max_entries bounds a table of any plane. kOutOfRange: the
  // nodes cannot be mapped.
  static Result<std::unique_ptr<PageTables>> Create(std::vector<PagePool*> pools, int max_entries, int64_t roots,
                                                    int64_t blocks);
  ~PageTables();
  PageTables(const PageTables&) = delete;
  PageTables& operator=(const PageTables&) = delete;

  int entries(RootId root) const { return root_meta_[root].entries; }
  const Entry& entry(RootId root, int i) const {
    const uint32_t block = roots_[int64_t{root} * root_stride_ + i / kBlockEntries];
    return blocks_[int64_t{block} * kBlockEntries + i % kBlockEntries];
  }

  // Blocks that Build will take for this change: those that hold anything past the last full block of the kept prefix.
  static int BlocksNeeded(int prefix, int middle, int added) {
    const int total = prefix + middle + added;
    return (total + kBlockEntries - 1) / kBlockEntries - prefix / kBlockEntries;
  }
  // A new table: entries [0, prefix) and [from, to) of `old`, then `added`, whose pages hand over the one reference
  // that each has. Full blocks of the prefix are shared. The result has one reference; an empty result is kEmptyTable.
  // REQUIRES prefix <= from <= to <= entries(old), room in the root, one free root and BlocksNeeded free blocks.
  RootId Build(int plane, RootId old, int prefix, int from, int to, std::span<const Entry> added);
  void Ref(RootId root);
  void Unref(RootId root);

  // Free nodes that nobody reserved.
  int64_t free_roots() const { return static_cast<int64_t>(free_roots_.size()) - reserved_roots_; }
  int64_t free_blocks() const { return static_cast<int64_t>(free_blocks_.size()) - reserved_blocks_; }
  // Sets nodes aside for a Build that may not fail; Unreserve just before it. REQUIRES as many free nodes.
  void Reserve(int64_t roots, int64_t blocks);
  void Unreserve(int64_t roots, int64_t blocks);

  int64_t used_roots() const { return static_cast<int64_t>(root_meta_.size() - 1 - free_roots_.size()); }
  int64_t used_blocks() const { return static_cast<int64_t>(block_meta_.size() - free_blocks_.size()); }
  int64_t reserved_roots() const { return reserved_roots_; }
  int64_t reserved_blocks() const { return reserved_blocks_; }
  int64_t roots_built() const { return roots_built_; }
  int64_t blocks_built() const { return blocks_built_; }
  int64_t entries_written() const { return entries_written_; }

  // For kernels and audits.
  const uint32_t* root_data() const { return roots_; }
  int root_stride() const { return root_stride_; }
  const Entry* block_data() const { return blocks_; }
  int64_t root_capacity() const { return static_cast<int64_t>(root_meta_.size()); }
  int64_t block_capacity() const { return static_cast<int64_t>(block_meta_.size()); }
  uint32_t root_refs(RootId root) const { return root_meta_[root].refs; }
  int root_plane(RootId root) const { return root_meta_[root].plane; }
  uint32_t block_refs(uint32_t block) const { return block_meta_[block].refs; }
  int block_count(uint32_t block) const { return static_cast<int>(block_meta_[block].count); }

 private:
  struct RootMeta {
    uint32_t refs = 0;
    int32_t entries = 0, plane = 0;
  };
  struct BlockMeta {
    uint32_t refs = 0, count = 0;
  };
  PageTables() = default;
  void UnrefBlock(int plane, uint32_t block);

  std::vector<PagePool*> pools_;
  int root_stride_ = 1;
  uint32_t* roots_ = nullptr;  // [root_capacity][root_stride]
  Entry* blocks_ = nullptr;    // [block_capacity][64]
  int64_t root_bytes_ = 0, block_bytes_ = 0;
  std::vector<RootMeta> root_meta_;
  std::vector<BlockMeta> block_meta_;
  std::vector<uint32_t> free_roots_, free_blocks_;
  int64_t reserved_roots_ = 0, reserved_blocks_ = 0;
  int64_t roots_built_ = 0, blocks_built_ = 0, entries_written_ = 0;
};

}  // namespace livequant
