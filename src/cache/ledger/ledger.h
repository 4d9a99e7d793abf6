// cache/ledger/ledger.h: what a cache costs, from the schema and shapes alone. Pure functions; knows no pool and no view.
//
// Each byte stands in exactly one term. Slack (slots of part-filled pages that hold no row), workspace and artifacts are
// separate categories outside the total. Spec: design.md "Ledger and truth", methods.md 10, the article's 0x04.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "schema/layout.h"
#include "schema/schema.h"

namespace livequant {

struct LedgerBytes {
  int64_t codes = 0;         // packed codes of coded rows, native formats included
  int64_t qparams = 0;       // scales, minima, offsets, per-row tables
  int64_t residual = 0;      // exact rows that may still be coded
  int64_t sparse = 0;        // outlier values and their indices
  int64_t exact_prefix = 0;  // pinned exact rows
  int64_t pages = 0;         // headers and alignment inside pages
  // Outside the total:
  int64_t slack = 0;         // page bytes that hold no row: pool bytes == total() + slack
  int64_t tables = 0;        // page table blocks and roots, outside the pool
  int64_t workspace = 0;     // step rows and decode tiles
  int64_t artifact = 0;      // static scales and codebooks: once per process
  int64_t shared = 0;        // bytes of the total that more than one sequence reaches (census only)

  int64_t total() const { return codes + qparams + residual + sparse + exact_prefix + pages; }
  LedgerBytes& operator+=(const LedgerBytes& other);
  bool operator==(const LedgerBytes&) const = default;
};

// One stored tensor of a set of like layers, in terms that fit every published format: those that the runtime reads are
// derived from the schema (SegmentsOf), others (MLA, block formats, sparse) are written out by hand for counting.
struct LedgerSegment {
  std::string name;
  int64_t layers = 0;
  int64_t heads = 0;                 // cached heads; 1 for a latent
  int64_t values = 0;                // values of one row of one head
  double code_bits = 0;              // of one value
  double row_qparam_bytes = 0;       // per row and head
  double group_qparam_bytes = 0;     // per closed group and head (scale axis along rows)
  int64_t group_rows = 0;
  double row_sparse_bytes = 0;       // per row, all heads
  int64_t exact_value_bytes = 2;
  Closure closure;
  int64_t window = 0;                // 0 = all rows are kept
  int64_t pinned = 0;
  int64_t coded_page_rows = 0, exact_page_rows = 0;  // 0: no pages, no slack
  int64_t static_bytes = 0;          // artifact bytes
};
std::vector<LedgerSegment> SegmentsOf(const CacheSchema& schema);

// Bytes of `tokens` rows of one sequence that only grew. tokens >= 0.
LedgerBytes Ledger(std::span<const LedgerSegment> segments, int64_t tokens);
LedgerBytes Ledger(const CacheSchema& schema, int64_t tokens);

// Bytes that one decode step reads when `tokens` rows exist, the new row included: codes, qparams, exact and sparse rows.
int64_t DecodeReadBytes(std::span<const LedgerSegment> segments, int64_t tokens);
// Sum over `generate` steps that start after `prompt` rows; inclusive: the new row is read in its own step (methods.md 10.4).
int64_t CumulativeReadBytes(std::span<const LedgerSegment> segments, int64_t prompt, int64_t generate, bool inclusive);

// Pages that each plane needs, [class * 4 + tensor * 2 + form], so that `sequences` sequences of up to `tokens` rows can be grown by
// steps of at most `max_step_rows` rows, transients of a step included. Rising in every argument.
std::vector<int64_t> PagesFor(const CacheSchema& schema, int64_t tokens, int64_t sequences, int max_step_rows);
// Bytes of those pages.
int64_t PoolBytes(const CacheSchema& schema, std::span<const int64_t> pages);
// The most tokens of one sequence, and the most sequences of `tokens` rows, whose pages fit in `bytes`. 0 if not even one.
int64_t TokensThatFit(const CacheSchema& schema, int64_t bytes, int max_step_rows);
int64_t SequencesThatFit(const CacheSchema& schema, int64_t bytes, int64_t tokens, int max_step_rows);

}  // namespace livequant
