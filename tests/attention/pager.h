// tests/attention/pager.h: a cache built by hand for one layer: rows are laid into pages at shuffled addresses, with
// scars, gaps, pinned rows and short groups, and every byte that no live row owns is poison (0xFF, which decodes to
// NaN).
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <vector>

#include "attention/attention.h"
#include "support/property.h"

namespace livequant {

// A coding of K and V with its closures, as a preset has it.
struct TestFormat {
  const char* name;
  TensorCoding k, v;
  Closure k_closure{-1, 1}, v_closure{-1, 1};
};

inline TensorCoding Native(DType t) { return {.kind = CodeKind::kNative, .dtype = t, .bits = 8 * DTypeBytes(t)}; }
inline TensorCoding Fp8(DType t, float scale) {
  return {.kind = CodeKind::kScaledFp, .dtype = t, .bits = 8, .axis = ScaleAxis::kTensor, .static_scale = scale};
}
inline TensorCoding Integer(int bits, ScaleAxis axis, int group, ZeroConvention zero, DType qparam = DType::kF16) {
  return {.kind = CodeKind::kInteger, .bits = bits, .axis = axis, .group = group, .zero = zero, .qparam = qparam};
}

// Every form that a preset has, for heads of `dim` channels.
inline std::vector<TestFormat> TestFormats(int dim) {
  const int g = dim % 32 == 0 ? 32 : 16;
  const auto sym = [&](int bits) { return Integer(bits, ScaleAxis::kRow, dim, ZeroConvention::kSymmetric); };
  const auto channel = [&](int bits) { return Integer(bits, ScaleAxis::kChannel, 32, ZeroConvention::kMinimum); };
  const auto row = [&](int bits) { return Integer(bits, ScaleAxis::kRow, g, ZeroConvention::kMinimum); };
  const auto offset = [&](int bits) { return Integer(bits, ScaleAxis::kRow, dim, ZeroConvention::kFloatOffset); };
  return {
      {"f32", Native(DType::kF32), Native(DType::kF32)},
      {"f16", Native(DType::kF16), Native(DType::kF16)},
      {"bf16", Native(DType::kBF16), Native(DType::kBF16)},
      {"fp8_e4m3", Fp8(DType::kFp8E4M3, 0.37f), Fp8(DType::kFp8E4M3, 1.9f)},
      {"fp8_e5m2", Fp8(DType::kFp8E5M2, 2.5f), Fp8(DType::kFp8E5M2, 0.11f)},
      {"int8", sym(8), sym(8)},
      {"int4", sym(4), sym(4)},
      {"int2", sym(2), sym(2)},
      {"kivi4", channel(4), row(4), {0, 128}, {128, 1}},
      {"kivi2", channel(2), row(2), {0, 128}, {128, 1}},
      {"kivi2_sync", channel(2), row(2), {97, 32}, {97, 32}},
      {"qserve8", offset(8), offset(8), {0, 1}, {0, 1}},
      {"qserve4", offset(4), offset(4), {0, 1}, {0, 1}},
  };
}

inline LayerSchema MakeLayer(const TestFormat& f, int kv_heads, int dim, int window = 0, int pinned = 0) {
  LayerSchema s;
  s.num_kv_heads = kv_heads, s.head_dim = dim, s.window = window, s.pinned_rows = pinned;
  s.k = f.k, s.v = f.v, s.k_closure = f.k_closure, s.v_closure = f.v_closure;
  s.exact_dtype = f.k.kind == CodeKind::kNative ? f.k.dtype : DType::kF16;
  return s;
}

// One sequence as a step sees it.
struct TestSequence {
  int len = 0, count = 0;     // rows in all; rows of the step
  int ahead[2] = {0, 0};      // K, V: rows coded beyond what a fresh run would hold (closed ahead, after a truncate)
  std::vector<int> scars[2];  // K, V: positions from which rows go to a fresh page of the coded plane
  std::vector<int> exact_scars;
  std::vector<float> k, v;  // [len][kv_heads * dim]; pinned keys are after RoPE
};

class TestCache {
 public:
  // Rounds the sequences' rows to exact_dtype. Queries: [rows][q_heads * dim] in the batch's order.
  TestCache(const LayerSchema& schema, int read_step, const RopeTable* rope, std::vector<TestSequence> sequences,
            int q_heads, std::vector<float> q, Rng& rng)
      : schema_(schema), sequences_(std::move(sequences)), q_heads_(q_heads), q_(std::move(q)) {
    auto plan = PlanLayer(schema, rope, /*allow_fallback=*/false);
    EXPECT_TRUE(plan.ok()) << plan.status().ToString();
    plan_ = *plan;
    view_ = {};
    view_.closure[kK] = schema.k_closure, view_.closure[kV] = schema.v_closure;
    view_.read_step = read_step, view_.window = schema.window, view_.pinned = schema.pinned_rows;
    const int64_t width = int64_t{schema.num_kv_heads} * schema.head_dim;
    for (TestSequence& s : sequences_)
      for (std::vector<float>* rows : {&s.k, &s.v}) {
        EXPECT_EQ(rows->size(), static_cast<size_t>(s.len * width));
        Round(*rows);
      }
    // Which rows are coded, then which pages they need.
    int next_query = 0;
    for (TestSequence& s : sequences_) {
      SeqRow row{};
      row.len = s.len, row.count = s.count, row.first_query = next_query;
      next_query += s.count;
      const int first = s.len - s.count;
      for (int t : {kK, kV}) {
        row.f[t] = static_cast<int32_t>(std::min<int64_t>(view_.closure[t].frontier(first) + s.ahead[t], first));
        row.staged[t] =
            static_cast<int32_t>(std::max<int64_t>(row.f[t], CodedRowsRead(view_.closure[t], read_step, s.len - 1)));
      }
      rows_.push_back(row);
    }
    for (int t : {kK, kV})
      for (int form : {kCoded, kExact}) BuildPlane(t, form, rng);
    ShuffleBlocks(rng);
    step_k_.resize(static_cast<size_t>(next_query * width)), step_v_ = step_k_;
    for (size_t i = 0; i < sequences_.size(); ++i) {
      const TestSequence& s = sequences_[i];
      const auto from = static_cast<std::ptrdiff_t>((s.len - s.count) * width);
      std::copy(s.k.begin() + from, s.k.end(),
                step_k_.begin() + static_cast<std::ptrdiff_t>(rows_[i].first_query * width));
      std::copy(s.v.begin() + from, s.v.end(),
                step_v_.begin() + static_cast<std::ptrdiff_t>(rows_[i].first_query * width));
    }
    EXPECT_EQ(q_.size(), static_cast<size_t>(next_query) * q_heads * schema.head_dim);
    view_.seq = rows_.data(), view_.sequences = static_cast<int32_t>(rows_.size());
    view_.roots = roots_.data(), view_.root_stride = kRootStride, view_.blocks = entries_.data();
  }

  // `out` holds rows() * q_heads * head_dim values.
  AttentionCall Call(float* out) const {
    AttentionCall call{};
    call.plan = &plan_, call.view = view_, call.step_k = step_k_.data(), call.step_v = step_v_.data(),
    call.q = q_.data();
    call.num_q_heads = q_heads_, call.scale = scale, call.out = out;
    if (call.scale == 0) call.scale = 1.0f / std::sqrt(static_cast<float>(schema_.head_dim));
    return call;
  }
  int rows() const { return rows_.empty() ? 0 : rows_.back().first_query + rows_.back().count; }
  size_t out_size() const { return q_.size(); }
  std::vector<float> Reference() const {
    std::vector<float> out(out_size(), NAN);
    AttendReference(Call(out.data()));
    return out;
  }
  std::vector<float> Generic(int threads = 1) const {
    ThreadPool pool(threads);
    int max_len = 1;
    for (const TestSequence& s : sequences_) max_len = std::max(max_len, s.len);
    AttentionWorkspace workspace(threads, std::max(1, rows()), q_heads_, schema_.head_dim, max_len);
    std::vector<float> out(out_size(), NAN);
    AttendGeneric(Call(out.data()), workspace, pool);
    return out;
  }
  const CacheView& view() const { return view_; }
  const LayerPlan& plan() const { return plan_; }
  const TestSequence& sequence(int i) const { return sequences_[static_cast<size_t>(i)]; }
  const std::vector<float>& q() const { return q_; }

  // |out - reference| that f32 sums may reach: scores of size S carry about 16 S 2^-24, weights and sums a few more
  // roundings.
  double Tolerance() const {
    double k_max = 0, v_max = 0, q_max = 0;
    const int d = schema_.head_dim;
    for (const TestSequence& s : sequences_) {
      for (size_t i = 0; i < s.k.size(); i += static_cast<size_t>(d)) {
        double n = 0;
        for (int c = 0; c < d; ++c) n += double{s.k[i + static_cast<size_t>(c)]} * s.k[i + static_cast<size_t>(c)];
        k_max = std::max(k_max, std::sqrt(n));
      }
      for (float x : s.v) v_max = std::max(v_max, std::fabs(double{x}));
    }
    for (size_t i = 0; i < q_.size(); i += static_cast<size_t>(d)) {
      double n = 0;
      for (int c = 0; c < d; ++c) n += double{q_[i + static_cast<size_t>(c)]} * q_[i + static_cast<size_t>(c)];
      q_max = std::max(q_max, std::sqrt(n));
    }
    const double used = scale == 0 ? 1 / std::sqrt(double(d)) : scale;
    return v_max * 0x1p-24 * (16 * used * k_max * q_max + 64);
  }

  float scale = 0;  // 0: 1 / sqrt(head_dim)

 private:
  static constexpr int kRootStride = 16;

  void Round(std::vector<float>& rows) const {
    const BlockFormat& f = plan_.format[kK][kExact];
    const int per_page = f.block.rows;
    std::vector<std::byte> block(static_cast<size_t>(f.block.bytes));
    const int64_t n = static_cast<int64_t>(rows.size()) / f.head_dim;
    for (int64_t r = 0; r < n; r += per_page) {
      MatrixView<float> part(rows.data() + r * f.head_dim, std::min<int64_t>(per_page, n - r), f.head_dim);
      const Status s = EncodeRows(f, part, 0, block.data());
      ASSERT_TRUE(s.ok()) << s.ToString();
      DecodeRowsReference(f, block.data(), 0, part);
    }
  }

  // Starts of entries that serve [begin, end): begin, every page edge, every scar.
  static std::vector<int> Starts(int begin, int end, int page_rows, const std::vector<int>& scars) {
    std::vector<int> starts;
    for (int j = begin; j < end; ++j)
      if (j == begin || j % page_rows == 0 || std::count(scars.begin(), scars.end(), j) > 0) starts.push_back(j);
    return starts;
  }

  void BuildPlane(int t, int form, Rng& rng) {
    const BlockFormat& f = plan_.format[t][form];
    const int page_rows = f.block.rows;
    PlaneView& plane = view_.plane[t][form];
    plane.rows = page_rows;
    plane.layer_offset = 64 * rng.Range(0, 3);
    plane.head_stride = f.block.bytes + 64 * rng.Range(0, 2);
    plane.page_stride = plane.layer_offset + plane.head_stride * schema_.num_kv_heads + 64;

    struct Laid {
      size_t sequence;
      int begin, end;
    };
    std::vector<Laid> laid;
    std::vector<std::vector<Entry>> tables(rows_.size());
    for (size_t i = 0; i < rows_.size(); ++i) {
      const SeqRow& row = rows_[i];
      const int first = row.len - row.count;
      // Rows that stay reachable: pinned ones, and of the others those that the step's first query can still see.
      const int low = view_.window > 0 ? std::max(0, first - view_.window + 1) : 0;
      const auto lay = [&](int begin, int end, const std::vector<int>& scars) {
        const std::vector<int> starts = Starts(begin, end, page_rows, scars);
        for (size_t e = 0; e < starts.size(); ++e) {
          const int stop = e + 1 < starts.size() ? starts[e + 1] : end;
          laid.push_back({i, starts[e], stop});
          tables[i].push_back({static_cast<uint32_t>(laid.size() - 1), static_cast<uint32_t>(starts[e])});
        }
      };
      if (form == kCoded) {
        int begin = view_.pinned;
        if (low > begin)
          begin = std::max(begin, low / page_rows * page_rows);  // window entries are dropped page by page
        lay(begin, row.staged[t], sequences_[i].scars[t]);
      } else {
        const int pinned = std::min<int>(view_.pinned, first);
        lay(0, pinned, {});
        lay(std::max({pinned, row.f[t], low}), first, sequences_[i].exact_scars);
      }
    }
    // Pages at shuffled addresses, with unused ones among them.
    std::vector<uint32_t> place(laid.size() + 3);
    std::iota(place.begin(), place.end(), 0u);
    for (size_t i = place.size(); i > 1; --i)
      std::swap(place[i - 1], place[static_cast<size_t>(rng.Range(0, static_cast<int64_t>(i) - 1))]);
    auto& memory = memory_[t][form];
    memory.assign(place.size() * static_cast<size_t>(plane.page_stride), std::byte{0xFF});
    plane.base = memory.data();
    for (auto& table : tables)
      for (Entry& e : table) e.page = place[e.page];
    for (size_t p = 0; p < laid.size(); ++p)
      for (int h = 0; h < schema_.num_kv_heads; ++h)
        WriteRows(t, form, laid[p].sequence, laid[p].begin, laid[p].end, h,
                  memory.data() + place[p] * plane.page_stride + plane.layer_offset + h * plane.head_stride);
    for (size_t i = 0; i < rows_.size(); ++i) AddTable(i, t, form, tables[i]);
  }

  void WriteRows(int t, int form, size_t sequence, int begin, int end, int head, std::byte* block) {
    const BlockFormat& f = plan_.format[t][form];
    const TestSequence& s = sequences_[sequence];
    const int d = schema_.head_dim, rows = f.block.rows;
    const bool by_group = f.coding.axis == ScaleAxis::kChannel;
    const int64_t width = int64_t{schema_.num_kv_heads} * d;
    for (int j = begin; j < end;) {
      // A group that a later truncate cut was closed over its old rows: those past `end` are someone's dead rows.
      const int stop = by_group ? j / rows * rows + (j % rows / f.coding.group + 1) * f.coding.group : end;
      std::vector<float> part(static_cast<size_t>((stop - j) * d));
      for (int r = j; r < stop; ++r)
        for (int c = 0; c < d; ++c) {
          const std::vector<float>& from = t == kK ? s.k : s.v;
          const bool dead = r >= end;
          part[static_cast<size_t>((r - j) * d + c)] =
              dead ? 100.0f : from[static_cast<size_t>(r * width + int64_t{head} * d + c)];
        }
      const Status status = EncodeRows(f, MatrixView<const float>(part.data(), stop - j, d), j % rows, block);
      ASSERT_TRUE(status.ok()) << status.ToString();
      j = stop;
    }
  }

  void AddTable(size_t sequence, int t, int form, const std::vector<Entry>& table) {
    ASSERT_LE(table.size(), static_cast<size_t>(kRootStride * kBlockEntries));
    rows_[sequence].root[t][form] = static_cast<uint32_t>(roots_.size() / kRootStride);
    rows_[sequence].entries[t][form] = static_cast<int32_t>(table.size());
    for (int b = 0; b < kRootStride; ++b) {
      const size_t from = static_cast<size_t>(b) * kBlockEntries;
      if (from >= table.size()) {
        roots_.push_back(0xFFFFFFFFu);
        continue;
      }
      roots_.push_back(block_count_++);
      for (size_t e = from; e < from + kBlockEntries; ++e)
        entries_.push_back(e < table.size() ? table[e] : Entry{0xFFFFFFFFu, 0xFFFFFFFFu});
    }
  }

  void ShuffleBlocks(Rng& rng) {
    std::vector<uint32_t> place(block_count_);
    std::iota(place.begin(), place.end(), 0u);
    for (size_t i = place.size(); i > 1; --i)
      std::swap(place[i - 1], place[static_cast<size_t>(rng.Range(0, static_cast<int64_t>(i) - 1))]);
    std::vector<Entry> moved(entries_.size());
    for (size_t b = 0; b < place.size(); ++b)
      std::copy_n(entries_.begin() + static_cast<std::ptrdiff_t>(b * kBlockEntries), kBlockEntries,
                  moved.begin() + static_cast<std::ptrdiff_t>(size_t{place[b]} * kBlockEntries));
    entries_ = std::move(moved);
    for (uint32_t& r : roots_)
      if (r != 0xFFFFFFFFu) r = place[r];
  }

  LayerSchema schema_;
  std::vector<TestSequence> sequences_;
  int q_heads_;
  std::vector<float> q_, step_k_, step_v_;
  LayerPlan plan_;
  CacheView view_;
  std::vector<SeqRow> rows_;
  std::vector<std::byte> memory_[2][2];
  std::vector<uint32_t> roots_;
  std::vector<Entry> entries_;
  uint32_t block_count_ = 0;
};

inline TestSequence MakeSequence(Rng& rng, const LayerSchema& schema, int len, int count) {
  TestSequence s;
  s.len = len, s.count = count;
  const int64_t width = int64_t{schema.num_kv_heads} * schema.head_dim;
  s.k = NormalWithOutliers(rng, len, width);
  s.v = NormalWithOutliers(rng, len, width);
  return s;
}

inline std::vector<float> MakeQueries(Rng& rng, int64_t values) {
  std::vector<float> q(static_cast<size_t>(values));
  for (float& x : q) x = static_cast<float>(0.5 * rng.Normal());
  return q;
}

inline void ExpectNear(const std::vector<float>& got, const std::vector<float>& want, double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  double worst = 0;
  size_t at = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(std::isfinite(want[i])) << "reference at " << i;
    ASSERT_TRUE(std::isfinite(got[i])) << "at " << i;
    const double e = std::fabs(double{got[i]} - want[i]);
    if (e > worst) worst = e, at = i;
  }
  EXPECT_LE(worst, tolerance) << "at " << at << ": " << got[at] << " for " << want[at];
}

inline void ExpectSameBits(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    uint32_t x, y;
    std::memcpy(&x, &a[i], 4), std::memcpy(&y, &b[i], 4);
    ASSERT_EQ(x, y) << "at " << i << ": " << a[i] << " and " << b[i];
  }
}

}  // namespace livequant
