// cache/ledger/ledger.h: what a cache costs, from the schema and shapes alone. Pure functions; knows no pool and no
// view.
//
// Each byte stands in exactly one term. Slack (slots of part-filled pages that hold no row), workspace and artifacts
// are separate categories outside the total. Spec: design.md "Ledger and truth", methods.md 10, the article's 0x04.
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
  int64_t slack = 0;      // page bytes that hold no row: pool bytes == total() + slack
  int64_t tables = 0;     // page table blocks and roots, outside the pool
  int64_t workspace = 0;  // step rows and decode tiles
  int64_t artifact = 0;   // static scales and codebooks: once per process
  int64_t shared = 0;     // bytes of the total that more than one sequence reaches (census only)

  int64_t total() const { return codes + qparams + residual + sparse + exact_prefix + pages; }
  LedgerBytes& operator+=(const LedgerBytes& other);
  bool operator==(const LedgerBytes&) const = default;
};

// One stored tensor of a set of like layers, in terms that fit every published format: those that the runtime reads are
// derived from the schema (SegmentsOf), others (MLA, block formats, sparse) are written out by hand for counting.
struct LedgerSegment {
  std::string name;
  int64_t layers = 0;
  int64_t heads = 0;              // cached heads; 1 for a latent
  int64_t values = 0;             // values of one row of one head
  double code_bits = 0;           // of one value
  double row_qparam_bytes = 0;    // per row and head
  double group_qparam_bytes = 0;  // per closed group and head (scale axis along rows)
  int64_t group_rows = 0;
  double row_sparse_bytes = 0;  // per row, all heads
  int64_t exact_value_bytes = 2;
  Closure closure;
  int64_t window = 0;  // 0 = all rows are kept
  int64_t pinned = 0;
  int64_t coded_page_rows = 0, exact_page_rows = 0;        // 0: no pages, no slack
  int64_t coded_page_padding = 0, exact_page_padding = 0;  // alignment bytes of one page, of one layer and head
  int64_t static_bytes = 0;                                // artifact bytes of one layer
};
// Two segments, K and V, for each set of like layers, sized by schema/layout.h. REQUIRES Validate(schema).ok().
std::vector<LedgerSegment> SegmentsOf(const CacheSchema& schema);

// Bytes of `tokens` rows of one sequence that only grew, T = tokens, f = closure.frontier(T), W = window:
//   pinned [0, min(pinned, T))   coded [max(pinned, T - W), f)   exact [max(pinned, T - W, f), T)       W = 0: no lower
//   bound
// A page is in use while it holds such a row. In a page, bytes that belong to no such row or to a group without one are
// slack; alignment is `pages`, whole, for each page in use. So pages in use * page bytes == total() + slack. tables,
// workspace and shared stay 0 here. REQUIRES tokens >= 0.
LedgerBytes Ledger(std::span<const LedgerSegment> segments, int64_t tokens);
LedgerBytes Ledger(const CacheSchema& schema, int64_t tokens);

// Bytes that one decode step reads when `tokens` rows exist, the new row included: codes, qparams, exact and sparse
// rows, in the form that the query at position tokens - 1 reads under `stepwise`, each once (a kernel that reads K/V
// once a query head reads more).
int64_t DecodeReadBytes(std::span<const LedgerSegment> segments, int64_t tokens);
// Sum over `generate` steps that start after `prompt` rows; inclusive: the new row is read in its own step
// (methods.md 10.4). A format that keeps the new row exact for its own query reads it at exact_value_bytes.
int64_t CumulativeReadBytes(std::span<const LedgerSegment> segments, int64_t prompt, int64_t generate, bool inclusive);

// Pages that each plane needs, [class * 4 + tensor * 2 + form], so that `sequences` sequences of up to `tokens` rows
// can be grown by steps of at most `max_step_rows` rows (all sequences together), transients of a step included: rows
// that a step closes stay in their exact pages until it is published, and drafts (Mode::kPrefix) hold exact slots for
// all of their rows. Forks that write need up to one page a plane more. Rising in every argument. Without a window each
// growth of a plane in `tokens` is a page that the row at that length itself needs, however it is appended: exact
// planes hold ceil(tokens / E) until the tensor's first closure, then at once the most that any step at any length can
// hold. REQUIRES tokens, sequences >= 0, max_step_rows >= 1.
std::vector<int64_t> PagesFor(const CacheSchema& schema, int64_t tokens, int64_t sequences, int max_step_rows);
// Bytes of those pages, each plane rounded up to a multiple of `alignment`; INT64_MAX where the sum is beyond it.
int64_t PoolBytes(const CacheSchema& schema, std::span<const int64_t> pages, int64_t alignment = 1);
// The most tokens of one sequence whose pages fit in `bytes`: a pool of PagesFor(that many, 1, max_step_rows) takes
// exactly these rows and refuses the next. 0 if not even one; kMaxLedgerTokens where windows keep the pool from
// growing.
inline constexpr int64_t kMaxLedgerTokens = (int64_t{1} << 31) - 1;  // positions are int32
int64_t TokensThatFit(const CacheSchema& schema, int64_t bytes, int max_step_rows);
// The most sequences of `tokens` rows each whose pages fit in `bytes`; 0 if not even one. REQUIRES tokens >= 1.
int64_t SequencesThatFit(const CacheSchema& schema, int64_t bytes, int64_t tokens, int max_step_rows);

}  // namespace livequant
