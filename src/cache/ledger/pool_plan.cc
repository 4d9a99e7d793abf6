// How many pages each plane needs. Between the pages that rest needs and those that a step needs lies what the step
// still holds: exact rows that it closes (they go when it is published) and the new tail.
#include <algorithm>
#include <limits>
#include <numeric>

#include "base/int_math.h"
#include "cache/ledger/ledger.h"

namespace livequant {
namespace {

// The exact pages of one sequence, once its closures have begun, at whatever length.
class ExactPlane {
 public:
  ExactPlane(const Closure& closure, int64_t page_rows, int64_t pinned, int64_t max_draft_rows)
      : closure_(closure),
        page_rows_(page_rows),
        grain_(std::gcd(int64_t{closure.step}, page_rows)),
        pinned_(pinned),
        max_draft_rows_(max_draft_rows) {}

  // The most pages held during a step of `rows` rows, 0 = at rest. f and the new frontier are multiples of step, so a
  // range of exact rows starts at a multiple of grain within its page; at rest it has at most r = lag + step - 1 rows.
  int64_t Pages(int64_t rows) const {
    const int64_t pinned_pages = CeilDiv(pinned_, page_rows_);
    if (closure_.immediate()) return pinned_pages;
    const int64_t lag = closure_.lag, step = closure_.step, r = lag + step - 1;
    int64_t most = Span(r);
    // One run [f, T + rows). Either the new frontier stays at or below T, then the rows above T are at most r; or they
    // are drafts. With step > 1 neither reaches further than lag rows past the first multiple of step above T: no group
    // may close under a later draft.
    const int64_t run = r + std::min(rows, std::max(r, max_draft_rows_));
    most = std::max(most, Span(step == 1 ? run : std::min(run, r / step * step + step + lag)));
    // Two runs [f, T) and [to, T + rows) when the frontier passes T.
    if (rows > lag) most = std::max(most, Span(r) + Span(std::min(rows - 1, r)));
    return pinned_pages + most;
  }

 private:
  int64_t Span(int64_t rows) const { return rows <= 0 ? 0 : CeilDiv(page_rows_ - grain_ + rows, page_rows_); }

  Closure closure_;
  int64_t page_rows_, grain_, pinned_, max_draft_rows_;
};

// The most pages that `sequences` sequences hold while one step of `step_rows` rows is spread over them in any way.
// extra rows of a step buy extra pages; buying the cheapest first is best because prices are made to rise (the concave
// hull from above, so a bound).
int64_t SpreadPages(const ExactPlane& plane, int64_t sequences, int64_t step_rows) {
  const int64_t rest = plane.Pages(0);
  struct Corner {
    int64_t rows, pages;  // rows of a step of one sequence that buy so many pages
  };
  std::vector<Corner> hull = {{0, 0}};
  for (int64_t rows = 1; rows <= step_rows; ++rows) {
    const Corner next{rows, plane.Pages(rows) - rest};
    if (next.pages <= hull.back().pages) continue;
    // Drop corners that lie on or below the line from their predecessor to `next`.
    while (hull.size() >= 2) {
      const Corner &a = hull[hull.size() - 2], &b = hull.back();
      if ((b.pages - a.pages) * (next.rows - a.rows) > (next.pages - a.pages) * (b.rows - a.rows)) break;
      hull.pop_back();
    }
    hull.push_back(next);
  }
  int64_t pages = sequences * rest, left = step_rows;
  for (size_t i = 1; i < hull.size() && left > 0; ++i) {
    const int64_t rows = hull[i].rows - hull[i - 1].rows, gain = hull[i].pages - hull[i - 1].pages;
    const int64_t whole = std::min(sequences, left / rows);
    pages += whole * gain;
    left -= whole * rows;
    // Part of an edge buys at most its share, rounded down: pages are whole and the hull bounds every spread from
    // above.
    if (whole < sequences) {
      pages += left * gain / rows;
      break;
    }
  }
  return pages;
}

// Coded pages of one sequence: nothing moves among them, so a step needs what the length that it reaches needs.
int64_t CodedPages(const LayerClass& cls, const Closure& closure, int64_t tokens, int64_t step_rows) {
  const int64_t from = cls.pinned_rows, to = closure.frontier(tokens), rows = cls.coded_page_rows;
  const int64_t all = to <= from ? 0 : CeilDiv(to, rows) - from / rows;
  if (cls.window == 0 || tokens <= cls.window) return all;
  return std::min(
      all, CeilDiv(rows - 1 + cls.window + step_rows, rows));  // the window's rows in any position, and the step's
}

// Rows that a draft step can have: a tensor with step > 1 stops it lag rows past its next multiple of step, whatever T
// is.
int64_t MaxDraftRows(const std::vector<LayerClass>& classes, int64_t step_rows) {
  for (const LayerClass& cls : classes)
    for (const Closure& c : cls.closure)
      if (c.step > 1) step_rows = std::min<int64_t>(step_rows, c.lag + c.step);
  return step_rows;
}

int64_t ExactPages(const LayerClass& cls, const Closure& closure, int64_t tokens, int64_t sequences, int64_t step_rows,
                   int64_t max_draft_rows) {
  // Until rows are coded, everything is exact and in place.
  int64_t unclosed = std::min<int64_t>(tokens, cls.pinned_rows);
  const bool closes = closure.frontier(tokens) > cls.pinned_rows;
  if (!closure.immediate()) unclosed = closes ? 0 : tokens;
  int64_t pages = sequences * CeilDiv(unclosed, cls.exact_page_rows);
  if (closes) {
    // The longest unclosed length came before, and lengths only rise.
    const int64_t before = closure.immediate() ? 0 : cls.pinned_rows + closure.lag + closure.step - 1;
    const ExactPlane plane(closure, cls.exact_page_rows, cls.pinned_rows, max_draft_rows);
    pages = std::max({pages, sequences * CeilDiv(std::min(before, tokens), cls.exact_page_rows),
                      SpreadPages(plane, sequences, step_rows)});
  }
  return pages;
}

// The largest n in [0, limit] with fits(n), for a property that never holds again once it failed.
template <class Fits>
int64_t Largest(int64_t limit, Fits&& fits) {
  int64_t low = 0, high = limit;  // fits(low) or low == 0; every n > high fails
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (fits(middle))
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

}  // namespace

std::vector<int64_t> PagesFor(const CacheSchema& schema, int64_t tokens, int64_t sequences, int max_step_rows) {
  LQ_CHECK(tokens >= 0 && sequences >= 0 && max_step_rows >= 1);
  const std::vector<LayerClass> classes = LayerClasses(schema);
  const int64_t max_draft_rows = MaxDraftRows(classes, max_step_rows);
  std::vector<int64_t> pages(classes.size() * 4);
  for (size_t c = 0; c < classes.size(); ++c)
    for (const TensorIndex tensor : {kK, kV}) {
      const LayerClass& cls = classes[c];
      const Closure& closure = cls.closure[tensor];
      const size_t at = c * 4 + static_cast<size_t>(tensor) * 2;
      pages[at + kCoded] = sequences * CodedPages(cls, closure, tokens, max_step_rows);
      pages[at + kExact] = ExactPages(cls, closure, tokens, sequences, max_step_rows, max_draft_rows);
    }
  return pages;
}

int64_t PoolBytes(const CacheSchema& schema, std::span<const int64_t> pages, int64_t alignment) {
  const std::vector<LayerClass> classes = LayerClasses(schema);
  LQ_CHECK(pages.size() == classes.size() * 4);
  int64_t sum = 0;
  for (size_t c = 0; c < classes.size(); ++c)
    for (const TensorIndex tensor : {kK, kV})
      for (const FormIndex form : {kCoded, kExact}) {
        int64_t bytes = 0;
        if (__builtin_mul_overflow(pages[c * 4 + static_cast<size_t>(tensor) * 2 + static_cast<size_t>(form)],
                                   LayoutPlane(schema, classes[c], tensor, form).page_bytes, &bytes) ||
            __builtin_add_overflow(bytes, alignment - 1, &bytes) ||
            __builtin_add_overflow(sum, bytes / alignment * alignment, &sum))
          return std::numeric_limits<int64_t>::max();
      }
  return sum;
}

int64_t TokensThatFit(const CacheSchema& schema, int64_t bytes, int max_step_rows) {
  return Largest(kMaxLedgerTokens, [&](int64_t tokens) {
    return PoolBytes(schema, PagesFor(schema, tokens, 1, max_step_rows)) <= bytes;
  });
}

int64_t SequencesThatFit(const CacheSchema& schema, int64_t bytes, int64_t tokens, int max_step_rows) {
  LQ_CHECK(tokens >= 1);
  const int64_t one = PoolBytes(schema, PagesFor(schema, tokens, 1, max_step_rows));
  if (one > bytes) return 0;
  // Each sequence has pages of its own at rest; transients are shared, so more may fit than the first one's bytes say.
  int64_t limit = 1;
  while (PoolBytes(schema, PagesFor(schema, tokens, limit, max_step_rows)) <= bytes) limit *= 2;
  return Largest(limit, [&](int64_t sequences) {
    return PoolBytes(schema, PagesFor(schema, tokens, sequences, max_step_rows)) <= bytes;
  });
}

}  // namespace livequant
