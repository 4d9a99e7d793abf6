#include "cache/ledger/ledger.h"

#include <algorithm>
#include <cmath>

#include "base/int_math.h"
#include "schema/policy.h"

namespace livequant {
namespace {

// Aligned ranges of `size` that hold a row of [from, to).
constexpr int64_t RangesTouched(int64_t from, int64_t to, int64_t size) {
  return from >= to ? 0 : CeilDiv(to, size) - from / size;
}

// Whole bytes: published formats have fractions of a byte per value, never per segment.
int64_t Bytes(double bytes) { return std::llround(bytes); }

// Rows of one sequence of `tokens` rows whose first `coded_to` rows are read, or rest, in coded form.
struct Regions {
  Regions(const LedgerSegment& s, int64_t tokens, int64_t coded_to) {
    const int64_t low = s.window == 0 ? 0 : std::max<int64_t>(0, tokens - s.window);
    pinned = std::min(s.pinned, tokens);
    coded_from = std::max(s.pinned, low);
    this->coded_to = std::max(coded_to, coded_from);
    exact_from = std::min(this->coded_to, tokens);
    exact_to = tokens;
    if (coded_from > tokens) coded_from = this->coded_to = tokens;
  }
  int64_t coded() const { return coded_to - coded_from; }
  int64_t exact() const { return exact_to - exact_from; }
  int64_t groups(int64_t rows) const { return rows == 0 ? 0 : RangesTouched(coded_from, coded_to, rows); }

  int64_t pinned, coded_from, coded_to, exact_from, exact_to;
};

int64_t CodeBytes(const LedgerSegment& s, int64_t rows) {
  return Bytes(static_cast<double>(s.layers * s.heads * rows * s.values) * s.code_bits / 8);
}
int64_t QparamBytes(const LedgerSegment& s, int64_t rows, int64_t groups) {
  const double heads = static_cast<double>(s.layers * s.heads);
  return Bytes(heads *
               (static_cast<double>(rows) * s.row_qparam_bytes + static_cast<double>(groups) * s.group_qparam_bytes));
}
int64_t SparseBytes(const LedgerSegment& s, int64_t rows) {
  return Bytes(static_cast<double>(s.layers * rows) * s.row_sparse_bytes);
}
int64_t ExactBytes(const LedgerSegment& s, int64_t rows) {
  return s.layers * s.heads * rows * s.values * s.exact_value_bytes;
}

LedgerBytes One(const LedgerSegment& s, int64_t tokens) {
  const Regions r(s, tokens, s.closure.frontier(tokens));
  LedgerBytes b;
  b.codes = CodeBytes(s, r.coded());
  b.qparams = QparamBytes(s, r.coded(), r.groups(s.group_rows));
  b.sparse = SparseBytes(s, r.coded());
  b.residual = ExactBytes(s, r.exact());
  b.exact_prefix = ExactBytes(s, r.pinned);
  b.artifact = s.layers * s.static_bytes;
  if (s.coded_page_rows > 0) {
    const int64_t pages = RangesTouched(r.coded_from, r.coded_to, s.coded_page_rows), rows = pages * s.coded_page_rows;
    const int64_t groups = s.group_rows == 0 ? 0 : rows / s.group_rows;
    b.pages += s.layers * s.heads * pages * s.coded_page_padding;
    b.slack +=
        CodeBytes(s, rows) + QparamBytes(s, rows, groups) + SparseBytes(s, rows) - b.codes - b.qparams - b.sparse;
  }
  if (s.exact_page_rows > 0) {
    // The last pinned page and the first page of the tail may be one.
    const int64_t pinned_pages = CeilDiv(r.pinned, s.exact_page_rows);
    const int64_t tail_from = std::max(r.exact_from, std::min(r.exact_to, pinned_pages * s.exact_page_rows));
    const int64_t pages = pinned_pages + RangesTouched(tail_from, r.exact_to, s.exact_page_rows);
    b.pages += s.layers * s.heads * pages * s.exact_page_padding;
    b.slack += ExactBytes(s, pages * s.exact_page_rows) - b.residual - b.exact_prefix;
  }
  return b;
}

// Reads of the query at position tokens - 1, with or without its own row.
int64_t ReadBytes(const LedgerSegment& s, int64_t tokens, bool own_row) {
  if (tokens == 0) return 0;
  Regions r(s, tokens, CodedRowsRead(s.closure, kStepwise, tokens - 1));
  if (!own_row) {
    const int64_t last = tokens - 1;
    r.pinned = std::min(r.pinned, last);
    r.coded_from = std::min(r.coded_from, last);
    r.coded_to = std::min(r.coded_to, last);
    r.exact_from = std::min(r.exact_from, last);
    r.exact_to = last;
  }
  return CodeBytes(s, r.coded()) + QparamBytes(s, r.coded(), r.groups(s.group_rows)) + SparseBytes(s, r.coded()) +
         ExactBytes(s, r.exact() + r.pinned);
}

LedgerSegment SegmentOf(const LayerSchema& layer, TensorIndex tensor) {
  const TensorCoding& coding = tensor == kK ? layer.k : layer.v;
  const HeadBlock coded = CodedHeadBlock(layer, tensor), exact = ExactHeadBlock(layer, tensor);
  const int64_t group_bytes = coding.qparams_per_group() * DTypeBytes(coding.qparam);
  LedgerSegment s;
  s.heads = layer.num_kv_heads;
  s.values = layer.head_dim;
  s.code_bits = static_cast<double>(coded.row_bytes) * 8 / layer.head_dim;
  s.row_qparam_bytes = static_cast<double>(coded.groups_per_row * group_bytes);
  if (coded.groups_per_page > 0) {
    s.group_rows = coded.rows / coded.groups_per_page;
    s.group_qparam_bytes = static_cast<double>(layer.head_dim * group_bytes);
  }
  s.exact_value_bytes = exact.row_bytes / layer.head_dim;
  s.closure = tensor == kK ? layer.k_closure : layer.v_closure;
  s.window = layer.window;
  s.pinned = layer.pinned_rows;
  s.coded_page_rows = coded.rows;
  s.exact_page_rows = exact.rows;
  const int64_t qparams =
      (int64_t{coded.rows} * coded.groups_per_row + int64_t{coded.groups_per_page} * layer.head_dim) * group_bytes;
  s.coded_page_padding = coded.bytes - coded.rows * coded.row_bytes - qparams;
  s.exact_page_padding = exact.bytes - exact.rows * exact.row_bytes;
  if (coding.axis == ScaleAxis::kTensor) s.static_bytes = sizeof(coding.static_scale);
  return s;
}

}  // namespace

LedgerBytes& LedgerBytes::operator+=(const LedgerBytes& other) {
  // Every member by name: one that is added to the struct must be added here to compile.
  auto& [a, b, c, d, e, f, g, h, i, j, k] = *this;
  const auto& [oa, ob, oc, od, oe, of, og, oh, oi, oj, ok] = other;
  a += oa, b += ob, c += oc, d += od, e += oe, f += of, g += og, h += oh, i += oi, j += oj, k += ok;
  return *this;
}

std::vector<LedgerSegment> SegmentsOf(const CacheSchema& schema) {
  std::vector<LedgerSegment> segments;
  std::vector<bool> done(schema.layers.size());
  for (size_t i = 0; i < schema.layers.size(); ++i) {
    if (done[i]) continue;
    std::vector<int> alike;
    for (size_t j = i; j < schema.layers.size(); ++j)
      if (schema.layers[j] == schema.layers[i]) {
        done[j] = true;
        alike.push_back(static_cast<int>(j));
      }
    for (const TensorIndex tensor : {kK, kV}) {
      LedgerSegment s = SegmentOf(schema.layers[i], tensor);
      s.layers = static_cast<int64_t>(alike.size());
      s.name = "layers " + LayerListText(alike) + (tensor == kK ? " k" : " v");
      segments.push_back(std::move(s));
    }
  }
  return segments;
}

LedgerBytes Ledger(std::span<const LedgerSegment> segments, int64_t tokens) {
  LQ_CHECK(tokens >= 0);
  LedgerBytes sum;
  for (const LedgerSegment& s : segments) sum += One(s, tokens);
  return sum;
}

LedgerBytes Ledger(const CacheSchema& schema, int64_t tokens) { return Ledger(SegmentsOf(schema), tokens); }

int64_t DecodeReadBytes(std::span<const LedgerSegment> segments, int64_t tokens) {
  LQ_CHECK(tokens >= 0);
  int64_t bytes = 0;
  for (const LedgerSegment& s : segments) bytes += ReadBytes(s, tokens, /*own_row=*/true);
  return bytes;
}

int64_t CumulativeReadBytes(std::span<const LedgerSegment> segments, int64_t prompt, int64_t generate, bool inclusive) {
  LQ_CHECK(prompt >= 0 && generate >= 0);
  int64_t bytes = 0;
  for (int64_t i = 0; i < generate; ++i)
    for (const LedgerSegment& s : segments) bytes += ReadBytes(s, prompt + i + 1, inclusive);
  return bytes;
}

}  // namespace livequant
