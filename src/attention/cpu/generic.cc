// attention/cpu/generic.cc: AttendGeneric (attention.h), arithmetic id generic_f32.
//
// The bits of an output row, for one query and head (everything in f32, every product-sum fused):
//   score   s[j] = 16 chains, chain i over channels i, i + 16, ... of fma(q[c] * scale, k[j][c], .) from a product that
//           rounds, folded as a tree (TileDots)
//   leaf    256 rows by absolute position: m = max s, p[j] = exp(s[j] - m); l = 16 partial sums (j mod 16, j rising),
//   folded as
//           a tree; o[c] = chain over rows j rising of fma(p[j], v[j][c], o), from 0
//   merge   of (m, l, o) states a, b: m = max; wa = exp(ma - m), wb = exp(mb - m); l = fma(la, wa, lb * wb); o alike
//   node    left fold of its 8 leaves; the result is the left fold of its nodes; out = o / l
// A leaf without a visible row is skipped. Invariants that make these bits independent of everything else:
//   - rows that no query of a block reads in a form are zeros in the decoded tile, and scores of rows that a query does
//   not
//     see are replaced by select. So 0 * v with v finite is all that a masked row contributes: it changes no bit but
//     the sign of a zero, and the division adds +0 to make that sign positive.
//   - a tile with rows in both forms is two (or with pinned rows three) segments of rising rows; a query's weights are
//   zero
//     outside the segment's own rows, so its chain runs over rows in rising order whatever the other queries read.
#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "attention/cpu/workspace.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/cpu/generic.cc"
#include "hwy/foreach_target.h"  // compiles the part between BEFORE and AFTER once per ISA
#include "hwy/highway.h"
#include "kernels/cpu/exp-inl.h"
#include "kernels/cpu/tile_gemm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace livequant {
namespace HWY_NAMESPACE {
namespace attention {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, 16>;
using VF = hn::Vec<DF>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(DF()));
constexpr int kVirtual = 16;  // lanes of every sum, on every ISA
constexpr float kNone = -std::numeric_limits<float>::infinity();
using Impl = AttentionWorkspace::Impl;

// ---- rows of a tile ----

// One block of queries of one sequence and KV head.
struct Block {
  const AttentionCall* call;
  const Impl::Item* item;
  const Impl::Thread* thread;
  int group, dim, padded, queries, rows;  // rows == queries * group
  int64_t first_position;                 // of the block's first query
  int64_t step_first;                     // position of the sequence's first step row
};

// A tile's rows fall into segments of one form, in rising order of rows for every query.
enum Segment : int { kPinnedRows, kCodedRows, kExactRows, kSegments };

struct Range {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

HWY_INLINE int64_t LowestRow(const Block& b, int query) {
  const int64_t window = b.call->view.window;
  return window > 0 ? std::max<int64_t>(0, b.first_position + query - window + 1) : 0;
}

// Rows of [tile, tile + kTileRows) that `query` of the block reads in this segment. Both ends rise with the query.
HWY_INLINE Range RowsOf(const Block& b, int tensor, int segment, int query, int64_t tile) {
  const int64_t low = LowestRow(b, query), high = b.first_position + query + 1;
  const int64_t pinned = b.call->view.pinned, coded = b.thread->coded[tensor][query];
  Range r{low, high};
  if (segment == kPinnedRows) r.end = std::min(high, pinned);
  if (segment == kCodedRows) r = {std::max(low, pinned), std::min(high, coded)};
  if (segment == kExactRows) r.begin = std::max({low, pinned, coded});
  return {std::max(r.begin, tile), std::min(r.end, tile + kTileRows)};
}

// Which queries of a block read a segment of a tile, and the smallest range that holds all their rows.
struct Hull {
  int query_begin, query_end;
  Range rows;
  bool empty() const { return query_begin >= query_end; }
};

Hull HullOf(const Block& b, int tensor, int segment, int64_t tile) {
  Hull h{0, 0, {0, 0}};
  // Cheap answers first: the segment of the first and the last query bound all others.
  if (segment == kPinnedRows && tile >= b.call->view.pinned) return h;
  if (b.queries == 1) {
    const Range r = RowsOf(b, tensor, segment, 0, tile);
    return r.empty() ? h : Hull{0, 1, r};
  }
  for (int i = 0; i < b.queries; ++i) {
    const Range r = RowsOf(b, tensor, segment, i, tile);
    if (r.empty()) continue;
    if (h.empty()) h = {i, i + 1, r};
    h.query_end = i + 1;
    h.rows.end = r.end;
  }
  return h;
}

// Index of the last entry that starts at or before `row`; 0 if none does. Pages without scars or short groups hold
// page_rows rows each, so the first guess is nearly always right.
int FindEntry(const Block& b, int tensor, int form, int64_t row) {
  const CacheView& view = b.call->view;
  const int count = view.seq[b.item->sequence].entries[tensor][form];
  const auto start = [&](int i) -> int64_t { return view.entry(b.item->sequence, tensor, form, i).start; };
  if (count <= 1) return 0;
  const int guess =
      static_cast<int>(std::clamp<int64_t>((row - start(0)) / view.plane[tensor][form].rows, 0, count - 1));
  if (start(guess) <= row && (guess + 1 == count || row < start(guess + 1))) return guess;
  int low = 0, high = count;
  while (high - low > 1) {
    const int mid = (low + high) / 2;
    (start(mid) <= row ? low : high) = mid;
  }
  return low;
}

// Decodes rows [begin, end) of one form to f32 rows of `b.padded` values at `out`, through the sequence's table.
void DecodeRange(const Block& b, int tensor, int form, int64_t begin, int64_t end, float* out) {
  const AttentionCall& call = *b.call;
  const CacheView& view = call.view;
  const SeqRow& s = view.seq[b.item->sequence];
  int64_t stored_end = end;
  if (form == kExact) {
    stored_end = std::min(end, b.step_first);
    const int64_t width = int64_t{call.plan->schema.num_kv_heads} * b.dim;
    const float* step = (tensor == kK ? call.step_k : call.step_v) + int64_t{b.item->head} * b.dim;
    for (int64_t j = std::max(begin, b.step_first); j < end; ++j)
      std::memcpy(out + (j - begin) * b.padded, step + (s.first_query + j - b.step_first) * width,
                  sizeof(float) * b.dim);
  } else {
    LQ_CHECK(end <= s.staged[tensor]);
  }
  if (begin >= stored_end) return;

  const int count = s.entries[tensor][form], low = FindEntry(b, tensor, form, begin);
  const int64_t page_rows = view.plane[tensor][form].rows;
  for (int i = low; begin < stored_end; ++i) {
    LQ_CHECK(i < count);
    const Entry& e = view.entry(b.item->sequence, tensor, form, i);
    const int64_t base = e.start / page_rows * page_rows;
    int64_t stop = std::min(base + page_rows, stored_end);
    if (i + 1 < count) stop = std::min<int64_t>(stop, view.entry(b.item->sequence, tensor, form, i + 1).start);
    LQ_CHECK(e.start <= begin && begin < stop);  // a row that a query reads and no page serves
    call.plan->decode[tensor][form](call.plan->format[tensor][form],
                                    view.head_block(tensor, form, e.page, b.item->head), static_cast<int>(begin - base),
                                    MatrixView<float>(out, stop - begin, b.dim, b.padded));
    out += (stop - begin) * b.padded;
    begin = stop;
  }
}

// Rotates one key in place: pairs (x, y) -> (x cos - y sin, y cos + x sin).
void RotateRow(const RopeTable& table, int64_t position, float* row) {
  const DF df;
  const int half = table.dims() / 2;
  const float* cos = table.cos(position);
  const float* sin = table.sin(position);
  int i = 0;
  if (table.pairing() == RopePairing::kHalfSplit) {
    for (; i + kLanes <= half; i += kLanes) {
      const VF x = hn::LoadU(df, row + i), y = hn::LoadU(df, row + half + i);
      const VF c = hn::LoadU(df, cos + i), s = hn::LoadU(df, sin + i);
      hn::StoreU(hn::MulSub(x, c, hn::Mul(y, s)), df, row + i);
      hn::StoreU(hn::MulAdd(y, c, hn::Mul(x, s)), df, row + half + i);
    }
  } else {
    for (; i + kLanes <= half; i += kLanes) {
      VF x, y;
      hn::LoadInterleaved2(df, row + 2 * i, x, y);
      const VF c = hn::LoadU(df, cos + i), s = hn::LoadU(df, sin + i);
      hn::StoreInterleaved2(hn::MulSub(x, c, hn::Mul(y, s)), hn::MulAdd(y, c, hn::Mul(x, s)), df, row + 2 * i);
    }
  }
  const hn::CappedTag<float, 1> d1;
  const int step = table.pairing() == RopePairing::kHalfSplit ? 1 : 2;
  const int other = table.pairing() == RopePairing::kHalfSplit ? half : 1;
  for (; i < half; ++i) {
    float* p = row + i * step;
    const auto x = hn::LoadU(d1, p), y = hn::LoadU(d1, p + other);
    const auto c = hn::LoadU(d1, cos + i), s = hn::LoadU(d1, sin + i);
    hn::StoreU(hn::MulSub(x, c, hn::Mul(y, s)), d1, p);
    hn::StoreU(hn::MulAdd(y, c, hn::Mul(x, s)), d1, p + other);
  }
}

// Decodes the rows of [begin, end) that some query reads in a segment into thread->rows, row 0 for `begin`; the other
// rows of [begin, end) become zeros: whatever bytes stand there never enter a sum.
void LoadSegment(const Block& b, int tensor, int segment, int64_t tile, const Hull& hull, int64_t begin, int64_t end) {
  float* rows = b.thread->rows;
  const int form = segment == kCodedRows ? kCoded : kExact;
  const bool rotate = tensor == kK && segment != kPinnedRows && b.call->plan->schema.k_stage == RopeStage::kPre;
  int64_t done = begin;  // rows below are final
  auto load = [&](Range run) {
    if (done < run.begin)
      std::memset(rows + (done - begin) * b.padded, 0, sizeof(float) * (run.begin - done) * b.padded);
    if (!run.empty()) DecodeRange(b, tensor, form, run.begin, run.end, rows + (run.begin - begin) * b.padded);
    for (int64_t j = run.begin; rotate && j < run.end; ++j)
      RotateRow(*b.call->plan->rope, j, rows + (j - begin) * b.padded);
    done = run.end;
  };
  Range run{begin, begin};
  for (int i = hull.query_begin; i < hull.query_end; ++i) {
    Range r = RowsOf(b, tensor, segment, i, tile);
    r = {std::max(r.begin, begin), std::min(r.end, end)};
    if (r.empty()) continue;
    if (r.begin <= run.end) {
      run.end = r.end;
    } else {
      if (!run.empty()) load(run);
      run = r;
    }
  }
  if (!run.empty()) load(run);
  load({end, end});
}

// Blocks of few query rows read native rows where they lie, and score keys without a transposed copy; the others are
// worth a decoded tile. Full vectors of 16 lanes only.
constexpr int kFewRows = 6;
HWY_INLINE bool IsSmall(const Block& b) { return kLanes == 16 && b.rows <= kFewRows && b.dim % (4 * kLanes) == 0; }
// Head sizes that ScoreKeys is compiled for: with a stride known at compile time its addresses need no registers.
HWY_INLINE bool IsSmallKeys(const Block& b) { return IsSmall(b) && (b.dim == 64 || b.dim == 128); }

// The address of the rows of one form from `begin` on, as far as they lie side by side in one page as native values,
// are all read by the block's only query and need no rotation: `*count` rows, not beyond `end`. Else nullptr, and they
// are decoded first. The values, and so all bits, are the same either way.
const std::byte* NativeRows(const Block& b, int tensor, int segment, const Hull& hull, int64_t begin, int64_t end,
                            int64_t* count) {
  const AttentionCall& call = *b.call;
  const int form = segment == kCodedRows ? kCoded : kExact;
  const BlockFormat& f = call.plan->format[tensor][form];
  if (!IsSmall(b) || b.queries != 1 || f.coding.kind != CodeKind::kNative) return nullptr;
  if (tensor == kK && segment != kPinnedRows && call.plan->schema.k_stage == RopeStage::kPre) return nullptr;
  end = std::min(end, hull.rows.end);
  if (form == kExact) end = std::min(end, b.step_first);
  if (begin < hull.rows.begin || begin >= end) return nullptr;
  const int entries = call.view.seq[b.item->sequence].entries[tensor][form], i = FindEntry(b, tensor, form, begin);
  if (i >= entries) return nullptr;
  const Entry& e = call.view.entry(b.item->sequence, tensor, form, i);
  const int64_t page_rows = call.view.plane[tensor][form].rows, base = e.start / page_rows * page_rows;
  end = std::min(end, base + page_rows);
  if (i + 1 < entries) end = std::min<int64_t>(end, call.view.entry(b.item->sequence, tensor, form, i + 1).start);
  if (e.start > begin || begin >= end) return nullptr;
  *count = end - begin;
  return call.view.head_block(tensor, form, e.page, b.item->head) + (begin - base) * f.block.row_bytes;
}

// Calls fn(const T*) with rows of f32, f16 or bf16.
template <class Fn>
HWY_INLINE void WithNative(DType dtype, const std::byte* rows, Fn&& fn) {
  if (dtype == DType::kF32) return fn(reinterpret_cast<const float*>(rows));
  if (dtype == DType::kF16) return fn(reinterpret_cast<const hwy::float16_t*>(rows));
  LQ_CHECK(dtype == DType::kBF16);
  fn(reinterpret_cast<const hwy::bfloat16_t*>(rows));
}

#if HWY_TARGET != HWY_SCALAR
// Four channels of Lanes(d) rows as blocks of four: block i is 4 channels of row 4 i.
template <class D>
HWY_INLINE hn::Vec<D> LoadBlocks(D d, const hn::TFromD<D>* p, int64_t stride) {
  if constexpr (hn::MaxLanes(d) <= 4) {
    return hn::LoadU(d, p);
  } else {
    const hn::Half<D> half;
    return hn::Combine(d, LoadBlocks(half, p + static_cast<int64_t>(hn::MaxLanes(half)) * stride, stride),
                       LoadBlocks(half, p, stride));
  }
}
#endif

// rows [count][stride] x channels -> keys[channel][count]; count is a multiple of 16.
void Transpose(const float* rows, int64_t stride, int count, int channels, float* keys) {
#if HWY_TARGET == HWY_SCALAR
  for (int c = 0; c < channels; ++c)
    for (int r = 0; r < count; ++r) keys[c * count + r] = rows[r * stride + c];
#else
  const DF df;
  const hn::Repartition<double, DF> dd;
  static_assert(kLanes >= 4, "a block is four floats");
  for (int c = 0; c < channels; c += 4) {
    for (int r = 0; r < count; r += kLanes) {
      const float* p = rows + r * stride + c;
      const VF a0 = LoadBlocks(df, p, stride), a1 = LoadBlocks(df, p + stride, stride);
      const VF a2 = LoadBlocks(df, p + 2 * stride, stride), a3 = LoadBlocks(df, p + 3 * stride, stride);
      const auto t0 = hn::BitCast(dd, hn::InterleaveLower(df, a0, a1));
      const auto t1 = hn::BitCast(dd, hn::InterleaveLower(df, a2, a3));
      const auto t2 = hn::BitCast(dd, hn::InterleaveUpper(df, a0, a1));
      const auto t3 = hn::BitCast(dd, hn::InterleaveUpper(df, a2, a3));
      float* k = keys + c * count + r;
      hn::StoreU(hn::BitCast(df, hn::InterleaveLower(dd, t0, t1)), df, k);
      hn::StoreU(hn::BitCast(df, hn::InterleaveUpper(dd, t0, t1)), df, k + count);
      hn::StoreU(hn::BitCast(df, hn::InterleaveLower(dd, t2, t3)), df, k + 2 * count);
      hn::StoreU(hn::BitCast(df, hn::InterleaveUpper(dd, t2, t3)), df, k + 3 * count);
    }
  }
#endif
}

HWY_INLINE VF LoadAsF32(const float* p) { return hn::LoadU(DF(), p); }
template <class T>
HWY_INLINE VF LoadAsF32(const T* p) {
  return hn::PromoteTo(DF(), hn::LoadU(hn::Rebind<T, DF>(), p));
}

// ---- scores of few query rows, straight from rows of keys ----

#if HWY_TARGET != HWY_SCALAR && HWY_MAX_BYTES >= 64
// The lanes of 16 vectors, each folded as TileDots folds its chains, as the lanes of one. Vectors come in groups of
// four: fold four (lane i with i + 8, then i + 4), keep the rest for FoldGroups. Which row a lane ends up with is
// RowOfFold.
HWY_INLINE VF FoldFour(VF a, VF b, VF c, VF d) {
  const DF df;
  const VF ab = hn::Add(hn::ConcatLowerLower(df, b, a), hn::ConcatUpperUpper(df, b, a));
  const VF cd = hn::Add(hn::ConcatLowerLower(df, d, c), hn::ConcatUpperUpper(df, d, c));
  return hn::Add(hn::OddEvenBlocks(hn::SwapAdjacentBlocks(cd), ab), hn::OddEvenBlocks(cd, hn::SwapAdjacentBlocks(ab)));
}
HWY_INLINE VF FoldGroups(VF g0, VF g1, VF g2, VF g3) {
  const DF df;
  const hn::Repartition<double, DF> dd;
  const auto pair = [&](VF x, VF y) HWY_ATTR {
    const auto a = hn::BitCast(dd, x), b = hn::BitCast(dd, y);
    return hn::Add(hn::BitCast(df, hn::InterleaveLower(dd, a, b)), hn::BitCast(df, hn::InterleaveUpper(dd, a, b)));
  };
  const VF low = pair(g0, g1), high = pair(g2, g3);
  return hn::Add(hn::ConcatEven(df, high, low), hn::ConcatOdd(df, high, low));
}
// The lane that vector `i` of group `g` ends up in.
constexpr int RowOfFold(int g, int i) { return (g < 2 ? g : 6 + g) + 2 * (i == 1 ? 2 : i == 2 ? 1 : i); }

// out[m][j] for 16 rows of keys: a vector along the channels is 16 chains.
template <int M, int kDim, class T>
HWY_INLINE void DotRows(const float* HWY_RESTRICT q, const T* HWY_RESTRICT keys, float* HWY_RESTRICT out,
                        int64_t out_stride) {
  const DF df;
  VF group[4][M];
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    VF acc[4][M];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const T* row = keys + RowOfFold(g, i) * kDim;
#pragma GCC unroll 8
      for (int c = 0; c < kDim; c += kLanes) {
        const VF k = LoadAsF32(row + c);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
          const VF x = hn::LoadU(df, q + m * kDim + c);
          acc[i][m] = c == 0 ? hn::Mul(x, k) : hn::MulAdd(x, k, acc[i][m]);
        }
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) group[g][m] = FoldFour(acc[0][m], acc[1][m], acc[2][m], acc[3][m]);
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
    hn::StoreU(FoldGroups(group[0][m], group[1][m], group[2][m], group[3][m]), df, out + m * out_stride);
}

template <int M, int kDim, class T>
HWY_NOINLINE void ScoreKeysOf(const float* q, const T* keys, int64_t count, float* out, int64_t out_stride) {
  for (int64_t j = 0; j < count; j += kLanes) {
    DotRows<M, kDim>(q, keys + j * kDim, out + j, out_stride);
  }
}

template <int kDim, class T>
void ScoreKeysDim(int rows, const float* q, const T* keys, int64_t count, float* out, int64_t out_stride) {
  while (rows > 0) {
    const int m = rows <= 4 ? rows : 3;
    if (m == 1) ScoreKeysOf<1, kDim>(q, keys, count, out, out_stride);
    if (m == 2) ScoreKeysOf<2, kDim>(q, keys, count, out, out_stride);
    if (m == 3) ScoreKeysOf<3, kDim>(q, keys, count, out, out_stride);
    if (m == 4) ScoreKeysOf<4, kDim>(q, keys, count, out, out_stride);
    rows -= m, q += m * kDim, out += m * out_stride;
  }
}

// out[m][j] = what TileDots makes of q[m] and keys[j], for `rows` <= kFewRows rows of queries and `count` rows of keys,
// a multiple of 16; both [.][dim], dim one of those of IsSmallKeys.
template <class T>
void ScoreKeys(int rows, const float* q, const T* keys, int64_t count, int dim, float* out, int64_t out_stride) {
  if (dim == 64) return ScoreKeysDim<64>(rows, q, keys, count, out, out_stride);
  LQ_CHECK(dim == 128);
  ScoreKeysDim<128>(rows, q, keys, count, out, out_stride);
}
#else
template <class T>
void ScoreKeys(int, const float*, const T*, int64_t, int, float*, int64_t) {
  LQ_CHECK(false);  // IsSmallKeys is false
}
#endif

struct FourVectors {
  VF v0, v1, v2, v3;
};
HWY_INLINE void AddProduct(float weight, const FourVectors& v, FourVectors& sum) {
  const VF w = hn::Set(DF(), weight);
  sum.v0 = hn::MulAdd(w, v.v0, sum.v0), sum.v1 = hn::MulAdd(w, v.v1, sum.v1);
  sum.v2 = hn::MulAdd(w, v.v2, sum.v2), sum.v3 = hn::MulAdd(w, v.v3, sum.v3);
}

// out[m][c] = chain over `count` rows, from out[m][c], for M <= 6 rows of weights, reading native values where they
// lie. REQUIRES dim a multiple of 4 vectors.
template <int M, class T>
HWY_INLINE void AddNativeValues(const float* weight, int64_t weight_stride, const T* values, int dim, int64_t count,
                                float* out, int64_t out_stride) {
  const DF df;
  for (int c = 0; c < dim; c += 4 * kLanes) {
    FourVectors sum[M];
    for (int m = 0; m < M; ++m) {
      const float* o = out + m * out_stride + c;
      sum[m] = {hn::LoadU(df, o), hn::LoadU(df, o + kLanes), hn::LoadU(df, o + 2 * kLanes),
                hn::LoadU(df, o + 3 * kLanes)};
    }
    for (int64_t j = 0; j < count; ++j) {
      const T* p = values + j * dim + c;
      const FourVectors v{LoadAsF32(p), LoadAsF32(p + kLanes), LoadAsF32(p + 2 * kLanes), LoadAsF32(p + 3 * kLanes)};
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) AddProduct(weight[m * weight_stride + j], v, sum[m]);
    }
    for (int m = 0; m < M; ++m) {
      float* o = out + m * out_stride + c;
      hn::StoreU(sum[m].v0, df, o), hn::StoreU(sum[m].v1, df, o + kLanes);
      hn::StoreU(sum[m].v2, df, o + 2 * kLanes), hn::StoreU(sum[m].v3, df, o + 3 * kLanes);
    }
  }
}
template <class T>
void NativeValues(int rows, const float* weight, int64_t weight_stride, const T* values, int dim, int64_t count,
                  float* out, int64_t out_stride) {
  switch (rows) {
    case 1:
      return AddNativeValues<1>(weight, weight_stride, values, dim, count, out, out_stride);
    case 2:
      return AddNativeValues<2>(weight, weight_stride, values, dim, count, out, out_stride);
    case 3:
      return AddNativeValues<3>(weight, weight_stride, values, dim, count, out, out_stride);
    case 4:
      return AddNativeValues<4>(weight, weight_stride, values, dim, count, out, out_stride);
    case 5:
      return AddNativeValues<5>(weight, weight_stride, values, dim, count, out, out_stride);
    case 6:
      return AddNativeValues<6>(weight, weight_stride, values, dim, count, out, out_stride);
  }
  LQ_CHECK(false);
}

// ---- a leaf ----

// Copies, per query row, the columns that the query reads in this segment from `from` to `to`, both at the tile's first
// row.
void SelectRows(const Block& b, int tensor, int segment, int64_t tile, const Hull& hull, const float* from,
                int64_t from_stride, float* to, int64_t to_stride) {
  for (int i = hull.query_begin; i < hull.query_end; ++i) {
    const Range r = RowsOf(b, tensor, segment, i, tile);
    if (r.empty()) continue;
    for (int m = i * b.group; m < (i + 1) * b.group; ++m)
      std::memcpy(to + m * to_stride + (r.begin - tile), from + m * from_stride + (r.begin - tile),
                  sizeof(float) * static_cast<size_t>(r.end - r.begin));
  }
}

// Rows that are decoded at a time. A block of few query rows does little with a row, so what it decodes, transposes and
// reads back must stay in L1 (half of 48 KiB for rows, half for keys); a large one wants long chains
// (bench/attention_bench).
int64_t ChunkRows(const Block& b) {
  if (b.rows > 16) return kTileRows;
  return b.padded <= 64 ? 64 : 32;
}

void TileScores(const Block& b, int64_t tile, float* score) {
  Hull hull[kSegments];
  int used = 0;
  for (int s = 0; s < kSegments; ++s) used += !(hull[s] = HullOf(b, kK, s, tile)).empty();
  const int64_t chunk = ChunkRows(b);
  for (int s = 0; s < kSegments; ++s) {
    if (hull[s].empty()) continue;
    const int first = hull[s].query_begin * b.group, rows = (hull[s].query_end - hull[s].query_begin) * b.group;
    float* out = used == 1 ? score : b.thread->mixed;
    const int64_t stride = used == 1 ? kLeafRows : kTileRows;
    // Whole vectors of keys: tiles start at multiples of 128.
    const int64_t end = (hull[s].rows.end + kVirtual - 1) / kVirtual * kVirtual;
    const float* q = b.thread->q + int64_t{first} * b.padded;
    int64_t count = 0;
    for (int64_t at = hull[s].rows.begin / kVirtual * kVirtual; at < end; at += count) {
      float* to = out + first * stride + (at - tile);
      if (const std::byte* native = !IsSmallKeys(b) ? nullptr : NativeRows(b, kK, s, hull[s], at, end, &count)) {
        const int form = s == kCodedRows ? kCoded : kExact;
        int64_t taken = 0;
        WithNative(b.call->plan->format[kK][form].coding.dtype, native, [&]<class T>(const T* p) HWY_ATTR {
          taken = count / kLanes * kLanes;
          if (taken > 0) ScoreKeys(rows, q, p, taken, b.dim, to, stride);
        });
        if ((count = taken) > 0) continue;
      }
      count = std::min(chunk, end - at);
      LoadSegment(b, kK, s, tile, hull[s], at, at + count);
      if (IsSmallKeys(b)) {
        ScoreKeys(rows, q, b.thread->rows, count, b.dim, to, stride);
        continue;
      }
      Transpose(b.thread->rows, b.padded, static_cast<int>(count), b.dim, b.thread->keys);
      TileDots(q, b.padded, b.thread->keys, count, to, stride, rows, count, b.dim);
    }
    if (used > 1) SelectRows(b, kK, s, tile, hull[s], out, stride, score, kLeafRows);
  }
}

void TileValues(const Block& b, int64_t tile, const float* weight, float* out) {
  Hull hull[kSegments];
  int used = 0;
  for (int s = 0; s < kSegments; ++s) used += !(hull[s] = HullOf(b, kV, s, tile)).empty();
  const int64_t chunk = ChunkRows(b);
  for (int s = 0; s < kSegments; ++s) {
    if (hull[s].empty()) continue;
    const int first = hull[s].query_begin * b.group, rows = (hull[s].query_end - hull[s].query_begin) * b.group;
    const float* a = weight;
    int64_t stride = kLeafRows;
    if (used > 1) {
      std::memset(b.thread->mixed + first * kTileRows, 0, sizeof(float) * rows * kTileRows);
      SelectRows(b, kV, s, tile, hull[s], weight, kLeafRows, b.thread->mixed, kTileRows);
      a = b.thread->mixed, stride = kTileRows;
    }
    int64_t count = 0;
    for (int64_t at = hull[s].rows.begin; at < hull[s].rows.end; at += count) {
      if (const std::byte* native = NativeRows(b, kV, s, hull[s], at, hull[s].rows.end, &count)) {
        const int form = s == kCodedRows ? kCoded : kExact;
        WithNative(b.call->plan->format[kV][form].coding.dtype, native, [&](const auto* p) HWY_ATTR {
          NativeValues(rows, a + first * stride + (at - tile), stride, p, b.dim, count, out + int64_t{first} * b.padded,
                       b.padded);
        });
        continue;
      }
      count = std::min(chunk, hull[s].rows.end - at);
      LoadSegment(b, kV, s, tile, hull[s], at, at + count);
      TileGemm(a + first * stride + (at - tile), stride, b.thread->rows, b.padded, out + int64_t{first} * b.padded,
               b.padded, rows, b.padded, count, /*accumulate=*/true);
    }
  }
}

// The lanes of v folded as a tree: lane i with lane i + half, until one is left.
template <class D>
HWY_INLINE float FoldLanes([[maybe_unused]] D d, hn::Vec<D> v) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (hn::MaxLanes(d) > 1) {
    const hn::Half<D> half;
    return FoldLanes(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
#endif
  return hn::GetLane(v);
}

// Turns the scores of kRows rows, each kLeafRows long and live in [begin, end), into weights (zeros elsewhere), and
// gives each row's maximum and sum. Rows go side by side: one alone would wait for its own chains.
template <int kRows>
void SoftmaxOf(float* HWY_RESTRICT s, int begin, int end, float* max, float* sum) {
  const DF df;
  constexpr int kSums = kVirtual / kLanes;
  const int first = begin / kVirtual * kVirtual, last = (end + kVirtual - 1) / kVirtual * kVirtual;
  const VF none = hn::Set(df, kNone), lo = hn::Set(df, static_cast<float>(begin)),
           hi = hn::Set(df, static_cast<float>(end));
  auto live = [&](int j) HWY_ATTR {
    const VF at = hn::Iota(df, static_cast<float>(j));
    return hn::And(hn::Ge(at, lo), hn::Lt(at, hi));
  };
  VF top[kRows];
  for (int m = 0; m < kRows; ++m) top[m] = none;
  for (int j = first; j < last; j += kLanes) {
    for (int m = 0; m < kRows; ++m) {
      float* p = s + m * kLeafRows + j;
      VF x = hn::LoadU(df, p);
      if (j < begin || j + kLanes > end) {
        x = hn::IfThenElse(live(j), x, none);
        hn::StoreU(x, df, p);
      }
      top[m] = hn::Max(top[m], x);
    }
  }
  for (int m = 0; m < kRows; ++m) {
    top[m] = hn::MaxOfLanes(df, top[m]);
    max[m] = hn::GetLane(top[m]);
    float* p = s + m * kLeafRows;
    if (first > 0) std::memset(p, 0, sizeof(float) * static_cast<size_t>(first));
    if (last < kLeafRows) std::memset(p + last, 0, sizeof(float) * static_cast<size_t>(kLeafRows - last));
  }
  VF part[kRows][kSums];
  for (int m = 0; m < kRows; ++m)
    for (int i = 0; i < kSums; ++i) part[m][i] = hn::Zero(df);
  for (int j = first; j < last; j += kVirtual) {
    for (int i = 0; i < kSums; ++i) {
      for (int m = 0; m < kRows; ++m) {
        float* p = s + m * kLeafRows + j + i * kLanes;
        const VF e = Exp(df, hn::Sub(hn::LoadU(df, p), top[m]));  // e^-inf = 0: masked rows weigh exactly nothing
        hn::StoreU(e, df, p);
        part[m][i] = hn::Add(part[m][i], e);
      }
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int w = kSums / 2; w > 0; w /= 2)
      for (int i = 0; i < w; ++i) part[m][i] = hn::Add(part[m][i], part[m][i + w]);
    sum[m] = FoldLanes(df, part[m][0]);
  }
}

void SoftmaxRows(int rows, float* s, int begin, int end, float* max, float* sum) {
  for (; rows >= 4; rows -= 4, s += 4 * kLeafRows, max += 4, sum += 4) SoftmaxOf<4>(s, begin, end, max, sum);
  for (; rows >= 2; rows -= 2, s += 2 * kLeafRows, max += 2, sum += 2) SoftmaxOf<2>(s, begin, end, max, sum);
  if (rows == 1) SoftmaxOf<1>(s, begin, end, max, sum);
}

void ComputeLeaf(const Block& b, int64_t leaf, const SoftmaxState& state) {
  const int64_t base = leaf * kLeafRows, top = b.first_position + b.queries, low = LowestRow(b, 0);
  float* score = b.thread->score;
  auto visible = [&](int64_t tile) { return tile < top && tile + kTileRows > low; };
  for (int64_t tile = base; tile < base + kLeafRows; tile += kTileRows)
    if (visible(tile)) TileScores(b, tile, score + (tile - base));
  for (int i = 0; i < b.queries; ++i) {
    const int begin = static_cast<int>(std::max<int64_t>(LowestRow(b, i) - base, 0));
    const int end = static_cast<int>(std::min<int64_t>(b.first_position + i + 1 - base, kLeafRows));
    const int row = i * b.group;
    if (begin < end) {
      SoftmaxRows(b.group, score + row * kLeafRows, begin, end, state.max + row, state.sum + row);
    } else {
      std::memset(score + row * kLeafRows, 0, sizeof(float) * static_cast<size_t>(b.group) * kLeafRows);
      for (int m = row; m < row + b.group; ++m) state.max[m] = kNone, state.sum[m] = 0;
    }
  }
  std::memset(state.out, 0, sizeof(float) * static_cast<size_t>(b.rows) * b.padded);
  for (int64_t tile = base; tile < base + kLeafRows; tile += kTileRows)
    if (visible(tile)) TileValues(b, tile, score + (tile - base), state.out);
}

// a = merge(a, b), row by row. A state that has seen nothing is the identity.
void Merge(const SoftmaxState& a, const SoftmaxState& b, int rows, int padded) {
  const DF df;
  const hn::CappedTag<float, 1> d1;
  for (int m = 0; m < rows; ++m) {
    if (b.max[m] == kNone) continue;
    float* ao = a.out + int64_t{m} * padded;
    const float* bo = b.out + int64_t{m} * padded;
    if (a.max[m] == kNone) {
      a.max[m] = b.max[m], a.sum[m] = b.sum[m];
      std::memcpy(ao, bo, sizeof(float) * static_cast<size_t>(padded));
      continue;
    }
    const float max = std::max(a.max[m], b.max[m]);
    const float wa = hn::GetLane(Exp(d1, hn::Set(d1, a.max[m] - max))),
                wb = hn::GetLane(Exp(d1, hn::Set(d1, b.max[m] - max)));
    a.max[m] = max;
    a.sum[m] = hn::GetLane(hn::MulAdd(hn::Set(d1, a.sum[m]), hn::Set(d1, wa), hn::Set(d1, b.sum[m] * wb)));
    const VF va = hn::Set(df, wa), vb = hn::Set(df, wb);
    for (int c = 0; c < padded; c += kLanes)
      hn::StoreU(hn::MulAdd(hn::LoadU(df, ao + c), va, hn::Mul(hn::LoadU(df, bo + c), vb)), df, ao + c);
  }
}

// ---- a call ----

Block MakeBlock(const AttentionCall& call, const Impl& ws, const Impl::Item& item, const Impl::Thread& thread) {
  const LayerSchema& schema = call.plan->schema;
  const SeqRow& s = call.view.seq[item.sequence];
  Block b;
  b.call = &call, b.item = &item, b.thread = &thread;
  b.group = call.num_q_heads / schema.num_kv_heads;
  b.dim = schema.head_dim, b.padded = PaddedDim(schema.head_dim);
  b.queries = item.count, b.rows = item.count * b.group;
  b.step_first = s.len - s.count;
  b.first_position = b.step_first + item.first;
  LQ_CHECK(b.rows <= ws.block && b.padded <= ws.padded_dim);
  return b;
}

void LoadQueries(const Block& b) {
  const DF df;
  const AttentionCall& call = *b.call;
  const int first_row = call.view.seq[b.item->sequence].first_query + b.item->first;
  const VF scale = hn::Set(df, call.scale);
  for (int i = 0; i < b.queries; ++i) {
    for (int t : {kK, kV})
      b.thread->coded[t][i] = static_cast<int32_t>(call.view.coded_rows(b.item->sequence, t, b.first_position + i));
    for (int g = 0; g < b.group; ++g) {
      const float* q =
          call.q + (int64_t{first_row} + i) * call.num_q_heads * b.dim + (int64_t{b.item->head} * b.group + g) * b.dim;
      float* to = b.thread->q + (int64_t{i} * b.group + g) * b.padded;
      int c = 0;
      for (; c + kLanes <= b.dim; c += kLanes) hn::StoreU(hn::Mul(hn::LoadU(df, q + c), scale), df, to + c);
      for (; c < b.dim; ++c) to[c] = q[c] * call.scale;
    }
  }
}

void WriteOutput(const Block& b, const SoftmaxState& total) {
  const AttentionCall& call = *b.call;
  const int first_row = call.view.seq[b.item->sequence].first_query + b.item->first;
  for (int i = 0; i < b.queries; ++i)
    for (int g = 0; g < b.group; ++g) {
      const int m = i * b.group + g;
      float* out = call.out + (int64_t{first_row} + i) * call.num_q_heads * b.dim +
                   (int64_t{b.item->head} * b.group + g) * b.dim;
      const float* o = total.out + int64_t{m} * b.padded;
      const float sum = total.sum[m];
      for (int c = 0; c < b.dim; ++c) out[c] = o[c] / sum + 0.0f;
    }
}

// Folds leaf states, handed over by `leaf(index, state or nullptr)` in rising order, into total. A leaf is made in
// place where it starts a node, and a node where it starts the total: copying it there would give the same bits.
template <class MakeLeaf>
void FoldLeaves(const Block& b, int64_t begin, int64_t end, MakeLeaf&& make_leaf) {
  const Impl::Thread& t = *b.thread;
  for (int64_t node = begin / kNodeLeaves; node * kNodeLeaves < end; ++node) {
    const int64_t first = std::max(begin, node * kNodeLeaves), last = std::min(end, (node + 1) * kNodeLeaves);
    const SoftmaxState& into = node == begin / kNodeLeaves ? t.total : t.node;
    make_leaf(first, into);
    for (int64_t leaf = first + 1; leaf < last; ++leaf) {
      make_leaf(leaf, t.leaf);
      Merge(into, t.leaf, b.rows, b.padded);
    }
    if (&into == &t.node) Merge(t.total, t.node, b.rows, b.padded);
  }
}

SoftmaxState SlotOf(const Impl& ws, const Block& b, int64_t leaf) {
  float* p = ws.slots + b.item->slot + (leaf - b.item->leaf_begin) * b.rows * (b.padded + 2);
  return {p + int64_t{b.rows} * b.padded, p + int64_t{b.rows} * (b.padded + 1), p};
}

void RunItem(const AttentionCall& call, const Impl& ws, const Impl::Item& item, int thread) {
  const Block b = MakeBlock(call, ws, item, ws.thread[static_cast<size_t>(thread)]);
  LoadQueries(b);
  FoldLeaves(b, item.leaf_begin, item.leaf_end,
             [&](int64_t leaf, const SoftmaxState& state) HWY_ATTR { ComputeLeaf(b, leaf, state); });
  WriteOutput(b, b.thread->total);
}

void RunItems(const AttentionCall& call, Impl& ws, Team& team) {
  const int64_t items = static_cast<int64_t>(ws.items.size());
  if (ws.pieces.empty()) {
    team.For(items,
             [&](int64_t i, int thread) HWY_ATTR { RunItem(call, ws, ws.items[static_cast<size_t>(i)], thread); });
    return;
  }
  team.For(static_cast<int64_t>(ws.pieces.size()), [&](int64_t i, int thread) HWY_ATTR {
    const Impl::Piece& piece = ws.pieces[static_cast<size_t>(i)];
    const Block b =
        MakeBlock(call, ws, ws.items[static_cast<size_t>(piece.item)], ws.thread[static_cast<size_t>(thread)]);
    LoadQueries(b);
    for (int64_t leaf = piece.begin; leaf < piece.end; ++leaf) ComputeLeaf(b, leaf, SlotOf(ws, b, leaf));
  });
  team.For(items, [&](int64_t i, int thread) HWY_ATTR {
    const Block b = MakeBlock(call, ws, ws.items[static_cast<size_t>(i)], ws.thread[static_cast<size_t>(thread)]);
    FoldLeaves(b, b.item->leaf_begin, b.item->leaf_end, [&](int64_t leaf, const SoftmaxState& state) HWY_ATTR {
      const SoftmaxState from = SlotOf(ws, b, leaf);
      std::fill_n(state.max, b.rows, kNone);
      Merge(state, from, b.rows, b.padded);
    });
    WriteOutput(b, b.thread->total);
  });
}

}  // namespace attention

void RunAttention(const AttentionCall& call, AttentionWorkspace::Impl& ws, Team& team) {
  attention::RunItems(call, ws, team);
}

void RunAttentionItem(const AttentionCall& call, const AttentionWorkspace::Impl& ws,
                      const AttentionWorkspace::Impl::Item& item, int thread) {
  attention::RunItem(call, ws, item, thread);
}

}  // namespace HWY_NAMESPACE
}  // namespace livequant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace livequant {
HWY_EXPORT(RunAttention);
HWY_EXPORT(RunAttentionItem);

namespace {

// item(sequence, head, first query, count, first leaf, end leaf) for every block of queries of these heads, the longest
// (latest positions) of a sequence first.
template <class Item>
void ForItems(const AttentionCall& call, const AttentionWorkspace::Impl& ws, Team::Range heads, Item&& item) {
  const int group = call.num_q_heads / call.plan->schema.num_kv_heads, per_block = std::max(1, ws.block / group);
  int64_t rows = 0;
  for (int s = 0; s < call.view.sequences; ++s) {
    const SeqRow& seq = call.view.seq[s];
    LQ_CHECK(seq.count >= 0 && seq.count <= seq.len && seq.len <= ws.max_len);
    rows += seq.count;
    LQ_CHECK(rows <= ws.max_rows);
    for (int end = seq.count; end > 0; end -= std::min(end, per_block)) {
      const int count = std::min(end, per_block);
      const int64_t first = seq.len - seq.count + end - count, last = first + count;  // positions
      const int64_t low = call.view.window > 0 ? std::max<int64_t>(0, first - call.view.window + 1) : 0;
      for (int64_t head = heads.begin; head < heads.end; ++head)
        item(s, static_cast<int>(head), end - count, count, low / kLeafRows, (last + kLeafRows - 1) / kLeafRows);
    }
  }
}

// All items; then, if there are too few to fill the threads and their leaf states fit the slots, each is cut into runs
// of leaves. The plan changes who computes a leaf, never a bit.
void PlanItems(const AttentionCall& call, AttentionWorkspace::Impl& ws) {
  const LayerSchema& schema = call.plan->schema;
  const int group = call.num_q_heads / schema.num_kv_heads;
  ws.items.clear();
  ws.pieces.clear();
  int64_t leaves = 0, slot_floats = 0;
  ForItems(call, ws, {0, schema.num_kv_heads},
           [&](int sequence, int head, int first, int count, int64_t begin, int64_t end) {
             ws.items.push_back({sequence, head, first, count, begin, end, slot_floats});
             leaves += end - begin;
             slot_floats += (end - begin) * count * group * (PaddedDim(schema.head_dim) + 2);
           });
  const int64_t items = static_cast<int64_t>(ws.items.size()), wanted = int64_t{kPiecesPerThread} * ws.threads;
  if (ws.threads == 1 || items >= wanted || leaves < 2 * items || slot_floats > ws.slot_floats) return;
  const int64_t run = std::max<int64_t>(1, (leaves + wanted - 1) / wanted);
  for (int64_t i = 0; i < items; ++i)
    for (int64_t leaf = ws.items[static_cast<size_t>(i)].leaf_begin, end = ws.items[static_cast<size_t>(i)].leaf_end;
         leaf < end; leaf += run)
      ws.pieces.push_back({static_cast<int>(i), leaf, std::min(leaf + run, end)});
}

void CheckCall(const AttentionCall& call, const AttentionWorkspace::Impl& ws, int threads) {
  const LayerSchema& schema = call.plan->schema;
  LQ_CHECK(call.num_q_heads > 0 && call.num_q_heads % schema.num_kv_heads == 0);
  LQ_CHECK(call.num_q_heads <= ws.max_q_heads && schema.head_dim <= ws.max_head_dim);
  LQ_CHECK(threads <= ws.threads);
}

}  // namespace

void AttendHeads(const AttentionCall& call, AttentionWorkspace& workspace, Team::Range kv_heads, int thread) {
  const AttentionWorkspace::Impl& ws = *workspace.impl();
  CheckCall(call, ws, thread + 1);
  const auto run = HWY_DYNAMIC_DISPATCH(RunAttentionItem);
  ForItems(call, ws, kv_heads, [&](int sequence, int head, int first, int count, int64_t begin, int64_t end) {
    run(call, ws, {sequence, head, first, count, begin, end, 0}, thread);
  });
}

void AttendGeneric(const AttentionCall& call, AttentionWorkspace& workspace, Team& team) {
  AttentionWorkspace::Impl& ws = *workspace.impl();
  const LayerSchema& schema = call.plan->schema;
  CheckCall(call, ws, team.threads());
  const AttentionWorkspace::Impl::Shape shape = {call.step, call.num_q_heads, schema.num_kv_heads, schema.head_dim,
                                                 call.view.window};
  if (call.step == 0 || shape != ws.shape) {
    team.Barrier();  // all have looked
    if (team.thread() == 0) {
      PlanItems(call, ws);
      ws.shape = shape;
    }
    team.Barrier();
  }
  HWY_DYNAMIC_DISPATCH(RunAttention)(call, ws, team);
}

void AttendGeneric(const AttentionCall& call, AttentionWorkspace& workspace, ThreadPool& pool) {
  pool.Together([&](Team& team) { AttendGeneric(call, workspace, team); });
}

}  // namespace livequant
#endif
