#include "cache/owner/tables.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "base/check.h"

namespace livequant {
namespace {

Result<void*> MapNodes(const char* what, int64_t count, int64_t bytes) {
  void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    return Status(Code::kOutOfRange, "page tables: cannot map " + std::to_string(count) + " " + what + " (" +
                                         std::to_string(bytes) + " bytes): " + std::strerror(errno));
  return memory;
}

}  // namespace

Result<std::unique_ptr<PageTables>> PageTables::Create(std::vector<PagePool*> pools, int max_entries, int64_t roots,
                                                       int64_t blocks) {
  LQ_CHECK(max_entries >= 1 && roots >= 1 && blocks >= 1);
  const int64_t limit = int64_t{std::numeric_limits<uint32_t>::max()} - 1;
  if (roots > limit || blocks > limit)
    return Status(Code::kOutOfRange, "page tables: " + std::to_string(roots) + " roots and " + std::to_string(blocks) +
                                         " blocks, limit " + std::to_string(limit) + " of each");
  std::unique_ptr<PageTables> tables(new PageTables);
  tables->pools_ = std::move(pools);
  tables->root_stride_ = (max_entries + kBlockEntries - 1) / kBlockEntries;
  const int64_t root_bytes = (roots + 1) * tables->root_stride_ * int64_t{sizeof(uint32_t)};
  const int64_t block_bytes = blocks * kBlockEntries * int64_t{sizeof(Entry)};
  LQ_ASSIGN_OR_RETURN(void* root_memory, MapNodes("roots", roots, root_bytes));
  tables->roots_ = static_cast<uint32_t*>(root_memory);
  tables->root_bytes_ = root_bytes;
  LQ_ASSIGN_OR_RETURN(void* block_memory, MapNodes("blocks", blocks, block_bytes));
  tables->blocks_ = static_cast<Entry*>(block_memory);
  tables->block_bytes_ = block_bytes;
  tables->root_meta_.resize(static_cast<size_t>(roots) + 1);
  tables->block_meta_.resize(static_cast<size_t>(blocks));
  tables->free_roots_.resize(static_cast<size_t>(roots));
  tables->free_blocks_.resize(static_cast<size_t>(blocks));
  for (int64_t i = 0; i < roots; ++i) tables->free_roots_[static_cast<size_t>(i)] = static_cast<uint32_t>(roots - i);
  for (int64_t i = 0; i < blocks; ++i)
    tables->free_blocks_[static_cast<size_t>(i)] = static_cast<uint32_t>(blocks - 1 - i);
  return tables;
}

PageTables::~PageTables() {
  if (roots_ != nullptr) munmap(roots_, static_cast<size_t>(root_bytes_));
  if (blocks_ != nullptr) munmap(blocks_, static_cast<size_t>(block_bytes_));
}

RootId PageTables::Build(int plane, RootId old, int prefix, int from, int to, std::span<const Entry> added) {
  LQ_CHECK(0 <= prefix && prefix <= from && from <= to && to <= entries(old));
  const int middle = to - from, total = prefix + middle + static_cast<int>(added.size());
  LQ_CHECK(total <= root_stride_ * kBlockEntries);
  if (total == 0) return kEmptyTable;
  LQ_CHECK(!free_roots_.empty());
  const RootId root = free_roots_.back();
  free_roots_.pop_back();
  root_meta_[root] = {.refs = 1, .entries = total, .plane = plane};
  ++roots_built_;
  uint32_t* const ids = roots_ + int64_t{root} * root_stride_;
  // The whole root, whatever it holds: the cost of a change does not grow with the table.
  std::memcpy(ids, roots_ + int64_t{old} * root_stride_, static_cast<size_t>(root_stride_) * sizeof(uint32_t));
  const int shared = prefix / kBlockEntries;
  for (int b = 0; b < shared; ++b) ++block_meta_[ids[b]].refs;

  PagePool& pool = *pools_[static_cast<size_t>(plane)];
  for (int i = shared * kBlockEntries; i < total;) {
    LQ_CHECK(!free_blocks_.empty());
    const uint32_t block = free_blocks_.back();
    free_blocks_.pop_back();
    const int count = std::min(kBlockEntries, total - i);
    block_meta_[block] = {.refs = 1, .count = static_cast<uint32_t>(count)};
    ++blocks_built_;
    Entry* const out = blocks_ + int64_t{block} * kBlockEntries;
    for (int k = 0; k < count; ++k, ++i) {
      if (i < prefix + middle) {
        out[k] = entry(old, i < prefix ? i : from + i - prefix);
        pool.Ref(out[k].page);
      } else {
        out[k] = added[static_cast<size_t>(i - prefix - middle)];
        ++entries_written_;
      }
    }
    ids[(i - 1) / kBlockEntries] = block;
  }
  return root;
}

void PageTables::Ref(RootId root) {
  if (root == kEmptyTable) return;
  LQ_CHECK(root_meta_[root].refs > 0);
  ++root_meta_[root].refs;
}

void PageTables::Unref(RootId root) {
  if (root == kEmptyTable) return;
  RootMeta& meta = root_meta_[root];
  LQ_CHECK(meta.refs > 0);
  if (--meta.refs > 0) return;
  const uint32_t* const ids = roots_ + int64_t{root} * root_stride_;
  for (int b = 0; b * kBlockEntries < meta.entries; ++b) UnrefBlock(meta.plane, ids[b]);
  free_roots_.push_back(root);
}

void PageTables::UnrefBlock(int plane, uint32_t block) {
  BlockMeta& meta = block_meta_[block];
  LQ_CHECK(meta.refs > 0);
  if (--meta.refs > 0) return;
  PagePool& pool = *pools_[static_cast<size_t>(plane)];
  const Entry* const e = blocks_ + int64_t{block} * kBlockEntries;
  for (uint32_t i = 0; i < meta.count; ++i) pool.Unref(e[i].page);
  free_blocks_.push_back(block);
}

void PageTables::Reserve(int64_t roots, int64_t blocks) {
  LQ_CHECK(roots >= 0 && blocks >= 0 && roots <= free_roots() && blocks <= free_blocks());
  reserved_roots_ += roots;
  reserved_blocks_ += blocks;
}

void PageTables::Unreserve(int64_t roots, int64_t blocks) {
  LQ_CHECK(roots >= 0 && blocks >= 0 && roots <= reserved_roots_ && blocks <= reserved_blocks_);
  reserved_roots_ -= roots;
  reserved_blocks_ -= blocks;
}

}  // namespace livequant
