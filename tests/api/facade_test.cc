// include/livequant/livequant.hpp, and through it the C functions, against kv/kv_cache.h under random operations;
// shapes that models have; what bad spans and bad calls get.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <livequant/livequant.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "base/rng.h"
#include "kv/kv_cache.h"
#include "kv/planes.h"
#include "method/method.h"
#include "support/effort.h"
#include "support/property.h"

namespace livequant {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMaxRows = 700;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The status of what fn() throws; LQ_OK if it does not.
lq_status StatusOf(const std::function<void()>& fn, std::string* message = nullptr) {
  try {
    fn();
    return LQ_OK;
  } catch (const lq::Error& e) {
    if (message != nullptr) *message = e.what();
    return e.status();
  }
}

std::vector<float> Normal(Rng& rng, int64_t n) {
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = static_cast<float>(rng.Normal());
  return x;
}

int64_t Below(Rng& rng, int64_t n) { return rng.Range(0, n - 1); }

std::string AnyPreset(Rng& rng) {
  const std::vector<std::string>& names = PresetNames();
  return names[static_cast<size_t>(Below(rng, static_cast<int64_t>(names.size())))];
}

// Rows at a stride in a buffer of NaN, cut off behind the last value.
std::vector<float> Spread(const std::vector<float>& rows, int64_t width, int64_t stride) {
  const int64_t n = static_cast<int64_t>(rows.size()) / width;
  std::vector<float> out(static_cast<size_t>((n - 1) * stride + width), kNaN);
  for (int64_t r = 0; r < n; ++r)
    std::memcpy(&out[static_cast<size_t>(r * stride)], &rows[static_cast<size_t>(r * width)],
                static_cast<size_t>(width) * sizeof(float));
  return out;
}

// The same cache twice: through the facade, and as the library has it. Each operation is done on both.
struct Twins {
  CacheSchema schema;
  int q_heads;
  std::unique_ptr<KvCache> direct;
  std::optional<lq::Cache> cache;
  struct Pair {
    lq::Sequence mine;
    SeqId theirs;
  };
  std::vector<Pair> sequences;
  ThreadPool pool{1};

  Twins(const std::string& preset, const CacheShape& shape, int q_heads_per_kv, int threads)
      : schema(*PresetSchema(preset, shape)), q_heads(shape.num_kv_heads * q_heads_per_kv) {
    direct = *KvCache::Open(schema, {.max_sequences = 4, .max_len = kMaxRows, .max_q_heads = q_heads, .threads = 1});
    const lq::Schema mine(
        preset, {.num_layers = shape.num_layers, .num_kv_heads = shape.num_kv_heads, .head_dim = shape.head_dim});
    EXPECT_EQ(mine.Digest(), Digest(schema));
    cache.emplace(mine,
                  lq::Options{.max_sequences = 4, .max_len = kMaxRows, .max_q_heads = q_heads, .threads = threads});
  }
  void Open() { sequences.push_back({cache->Open(), direct->owner().Open()->seq}); }

  // One step of some sequences; the first may be a draft of which `accepted` rows are kept.
  void Append(Rng& rng, const std::vector<size_t>& which, const std::vector<int>& rows, int accepted) {
    std::vector<lq::Append> mine;
    std::vector<AppendRequest> theirs;
    for (size_t i = 0; i < which.size(); ++i) {
      const bool draft = i == 0 && accepted >= 0;
      mine.push_back({&sequences[which[i]].mine, rows[i], draft});
      theirs.push_back(
          {.seq = sequences[which[i]].theirs, .rows = rows[i], .mode = draft ? Mode::kPrefix : Mode::kAll});
    }
    auto expected = direct->Begin(theirs);
    std::optional<lq::Step> step;
    const lq_status began = StatusOf([&] { step.emplace(cache->Begin(mine)); });
    ASSERT_EQ(began, expected.ok() ? LQ_OK : static_cast<lq_status>(expected.status().code()));
    if (!expected.ok()) return;
    ASSERT_EQ(step->rows(), expected->rows());
    std::vector<int> keep;
    for (int i = 0; i < static_cast<int>(which.size()); ++i) {
      ASSERT_EQ(step->position(i), expected->position(i));
      ASSERT_EQ(step->first_row(i), expected->first_row(i));
      ASSERT_EQ(step->count(i), expected->count(i));
      keep.push_back(i == 0 && accepted >= 0 ? std::min(accepted, step->count(i)) : step->count(i));
    }
    const LayerSchema& l = schema.layers[0];
    const int64_t width = int64_t{l.num_kv_heads} * l.head_dim, q_width = int64_t{q_heads} * l.head_dim;
    const int64_t n = step->rows();
    for (int layer = static_cast<int>(schema.layers.size()) - 1; layer >= 0; --layer) {  // any order
      std::vector<float> k = Normal(rng, n * width), v = Normal(rng, n * width);
      const std::vector<float> q = Normal(rng, n * q_width);
      const int64_t ks = width + Below(rng, 5), vs = width + Below(rng, 5), qs = q_width + Below(rng, 5);
      const int64_t os = q_width + Below(rng, 5);
      std::vector<float> out(static_cast<size_t>((n - 1) * os + q_width)), want(q.size());
      step->Prepare(layer, lq::Rows<const float>(Spread(k, width, ks), ks),
                    lq::Rows<const float>(Spread(v, width, vs), vs));
      step->Attend(layer, lq::Rows<const float>(Spread(q, q_width, qs), qs), q_heads, 0.25f, lq::Rows<float>(out, os));
      ASSERT_TRUE(expected->Prepare(layer, k.data(), v.data(), pool).ok());
      ASSERT_TRUE(expected->Attend(layer, q.data(), q_heads, 0.25f, want.data(), pool).ok());
      for (int64_t r = 0; r < n; ++r)
        ASSERT_EQ(std::memcmp(&out[static_cast<size_t>(r * os)], &want[static_cast<size_t>(r * q_width)],
                              static_cast<size_t>(q_width) * sizeof(float)),
                  0);
    }
    const auto receipts = expected->Publish(keep);
    ASSERT_TRUE(receipts.ok());
    const std::vector<int32_t> mine_keep(keep.begin(), keep.end());
    ASSERT_EQ(StatusOf([&] { step->Publish(mine_keep); }), LQ_OK);
  }
  void Compare() {
    for (const Pair& p : sequences) {
      ASSERT_EQ(p.mine.length(), direct->owner().length(p.theirs));
      ASSERT_EQ(p.mine.State(), direct->StateBytes(p.theirs));
    }
    ASSERT_EQ(cache->used_bytes(), direct->owner().used_bytes());
  }
};

TEST(Facade, RandomOperationsGiveTheBytesOfTheCacheItself) {
  ForAll(Effort(60, 6), [](Rng& rng) {
    const std::string preset = AnyPreset(rng);
    const CacheShape shape{.num_layers = static_cast<int>(rng.Range(1, 3)),
                           .num_kv_heads = static_cast<int>(rng.Range(1, 2)),
                           .head_dim = static_cast<int>(32 * rng.Range(1, 3)),
                           .rope = {.dims = 0}};
    CacheShape with_dims = shape;
    with_dims.rope.dims = shape.head_dim;
    SCOPED_TRACE(preset);
    Twins t(preset, with_dims, static_cast<int>(rng.Range(1, 3)), static_cast<int>(rng.Range(1, 2)));
    t.Open();
    for (int operation = 0; operation < 12; ++operation) {
      const size_t i = static_cast<size_t>(Below(rng, static_cast<int64_t>(t.sequences.size())));
      const int64_t length = t.sequences[i].mine.length();
      switch (Below(rng, 6)) {
        case 0:
          if (t.sequences.size() < 4) t.Open();
          break;
        case 1:
          if (t.sequences.size() < 4)
            t.sequences.push_back({t.sequences[i].mine.Fork(), t.direct->owner().Fork(t.sequences[i].theirs)->seq});
          break;
        case 2: {
          const int64_t to = rng.Range(0, length + 1);  // one too far is refused by both
          const Status theirs = t.direct->owner().Truncate(t.sequences[i].theirs, to).status();
          EXPECT_EQ(StatusOf([&] { t.sequences[i].mine.Truncate(to); }), static_cast<lq_status>(theirs.code()));
          break;
        }
        case 3:
          if (t.sequences.size() > 1) {
            ASSERT_TRUE(t.direct->owner().Release(t.sequences[i].theirs).ok());
            t.sequences.erase(t.sequences.begin() + static_cast<std::ptrdiff_t>(i));  // releases
          }
          break;
        default: {
          std::vector<size_t> which = {i};
          if (t.sequences.size() > 1 && rng.Chance(0.5)) which.push_back(i == 0 ? 1 : i - 1);
          std::vector<int> rows;
          for (size_t w = 0; w < which.size(); ++w)
            rows.push_back(static_cast<int>(rng.Chance(0.5) ? rng.Range(1, 3) : rng.Range(1, 140)));
          t.Append(rng, which, rows, rng.Chance(0.3) ? static_cast<int>(rng.Range(0, rows[0])) : -1);
        }
      }
      if (::testing::Test::HasFatalFailure()) return;
      t.Compare();
      if (::testing::Test::HasFatalFailure()) return;
    }
  });
}

TEST(Facade, ABadCallSaysWhyAndChangesNothing) {
  ForAll(Effort(40, 8), [](Rng& rng) {
    const std::string preset = AnyPreset(rng);
    CacheShape shape{.num_layers = 2, .num_kv_heads = 2, .head_dim = 64, .rope = {}};
    shape.rope.dims = 64;
    Twins t(preset, shape, 2, 1);
    t.Open();
    t.Append(rng, {0}, {static_cast<int>(rng.Range(1, 200))}, -1);
    const std::vector<std::byte> before = t.sequences[0].mine.State();
    const int n = static_cast<int>(rng.Range(1, 5));
    const int64_t width = 2 * 64, q_width = 4 * 64;
    std::vector<float> k = Normal(rng, n * width), v = k, q = Normal(rng, n * q_width), out(q.size());
    lq::Step step = t.cache->Begin(t.sequences[0].mine, n);
    std::string why;
    const auto expect = [&](lq_status status, const char* word, const std::function<void()>& fn) {
      EXPECT_EQ(StatusOf(fn, &why), status) << word;
      EXPECT_THAT(why, HasSubstr(word));
    };
    // The call is wrong, the step goes on.
    expect(LQ_INVALID_ARGUMENT, "layer is 2", [&] { step.Prepare(2, k, v); });
    expect(LQ_INVALID_ARGUMENT, "layer is -1", [&] { step.Prepare(-1, k, v); });
    expect(LQ_INVALID_ARGUMENT, "k has", [&] { step.Prepare(0, std::span(k).first(k.size() - 1), v); });
    expect(LQ_INVALID_ARGUMENT, "127", [&] { step.Prepare(0, k, lq::Rows<const float>(v, width - 1)); });
    expect(LQ_INVALID_ARGUMENT, "0", [&] { step.Attend(0, q, 4, 1.0f, out); });
    step.Prepare(0, k, v);
    expect(LQ_INVALID_ARGUMENT, "num_q_heads is 0", [&] { step.Attend(0, q, 0, 1.0f, out); });
    expect(LQ_INVALID_ARGUMENT, "3", [&] { step.Attend(0, q, 3, 1.0f, out); });
    expect(LQ_INVALID_ARGUMENT, "out has", [&] { step.Attend(0, q, 4, 1.0f, std::span(out).first(out.size() - 1)); });
    step.Attend(0, q, 4, 1.0f, out);
    expect(LQ_INVALID_ARGUMENT, "2 numbers of accepted", [&] { step.Publish(std::vector<int32_t>{1, 1}); });
    // The rows are wrong: the step has ended.
    const int kind = static_cast<int>(Below(rng, 3));
    if (kind == 0) expect(LQ_DUPLICATE_LAYER, "layer 0", [&] { step.Prepare(0, k, v); });
    if (kind == 1) expect(LQ_MISSING_LAYER, "layer 1", [&] { step.Publish(); });
    if (kind == 2) {
      const int64_t at = Below(rng, n * width);
      k[static_cast<size_t>(at)] = rng.Chance(0.5) ? kNaN : std::numeric_limits<float>::infinity();
      expect(LQ_NON_FINITE, "layer 1 K", [&] { step.Prepare(1, k, v); });
      EXPECT_THAT(why, HasSubstr("channel " + std::to_string(at % 64)));
    }
    expect(LQ_FAILED_STEP, "", [&] { step.Publish(); });
    EXPECT_EQ(t.sequences[0].mine.State(), before);
  });
}

TEST(Facade, RowsAreTakenIfAndOnlyIfTheyFit) {
  ForAll(300, [](Rng& rng) {
    const int64_t rows = rng.Range(1, 6), width = rng.Range(1, 9), stride = rng.Range(1, 12);
    std::vector<float> values(static_cast<size_t>(rng.Range(0, 70)));
    const bool fits =
        (rows == 1 || stride >= width) && (rows - 1) * stride + width <= static_cast<int64_t>(values.size());
    const lq::Rows<const float> at(values, stride), dense(values);
    EXPECT_EQ(StatusOf([&] { (void)at.StrideFor("x", rows, width); }), fits ? LQ_OK : LQ_INVALID_ARGUMENT);
    EXPECT_EQ(StatusOf([&] { (void)dense.StrideFor("x", rows, width); }),
              rows * width <= static_cast<int64_t>(values.size()) ? LQ_OK : LQ_INVALID_ARGUMENT);
  });
}

TEST(Facade, HandlesMayGoInAnyOrder) {
  std::optional<lq::Lease> lease;
  std::optional<lq::Step> step;
  std::optional<lq::Sequence> kept;
  {
    lq::Cache cache(lq::Schema("f16", {.num_layers = 1, .num_kv_heads = 1, .head_dim = 64}),
                    {.max_len = 8, .max_q_heads = 1});
    kept.emplace(cache.Open());
    const std::vector<float> row(64, 1.0f);
    lq::Step first = cache.Begin(*kept, 1);
    first.Prepare(0, row, row);
    first.Publish();
    first.Publish();  // again: nothing happens
    lease.emplace(kept->Acquire());
    step.emplace(cache.Begin(*kept, 1));
  }
  EXPECT_EQ(kept->length(), 1);
  lq::Sequence moved = std::move(*kept);
  kept.reset();
  EXPECT_EQ(moved.length(), 1);
  moved.Release();
  EXPECT_EQ(StatusOf([&] { (void)moved.length(); }), LQ_CLOSED);
  EXPECT_EQ(lease->length(), 1);
  EXPECT_EQ(lease->Read(0, lq::Tensor::kValues, 0), std::vector<float>(64, 1.0f));
  lease.reset();
  step.reset();
}

TEST(Facade, AnArrayIsTheRowsAtRest) {
  const lq::Schema schema("f32", {.num_layers = 1, .num_kv_heads = 2, .head_dim = 4});
  lq::Cache cache(schema, {.max_len = 8, .max_q_heads = 2});
  const lq::Sequence seq = cache.Open();
  std::vector<float> k, v;
  for (int i = 0; i < 3 * 8; ++i) k.push_back(static_cast<float>(i)), v.push_back(static_cast<float>(-i));
  lq::Step step = cache.Begin(seq, 3);
  step.Prepare(0, k, v);
  step.Publish();
  const lq::Lease lease = seq.Acquire();
  const lq::Array codes = lease.ReadArray(0, lq::Tensor::kValues, LQ_CODES);
  EXPECT_EQ(codes.dtype, LQ_U8);
  EXPECT_THAT(codes.shape, ::testing::ElementsAre(2, 3, 16));
  std::vector<float> values(24);
  ASSERT_EQ(codes.bytes.size(), values.size() * sizeof(float));
  std::memcpy(values.data(), codes.bytes.data(), codes.bytes.size());
  for (int head = 0; head < 2; ++head)
    for (int r = 0; r < 3; ++r)
      for (int c = 0; c < 4; ++c) EXPECT_EQ(values[(head * 3 + r) * 4 + c], v[r * 8 + head * 4 + c]);
  EXPECT_TRUE(lease.ReadArray(0, lq::Tensor::kKeys, LQ_SCALES).bytes.empty());
  EXPECT_TRUE(lease.ReadArray(0, lq::Tensor::kKeys, LQ_EXACT).bytes.empty());
  EXPECT_EQ(StatusOf([&] { (void)lease.ReadArray(1, lq::Tensor::kKeys, LQ_CODES); }), LQ_INVALID_ARGUMENT);
  EXPECT_EQ(StatusOf([&] { (void)lease.ReadArray(0, static_cast<lq::Tensor>(2), LQ_CODES); }), LQ_INVALID_ARGUMENT);
  EXPECT_EQ(StatusOf([&] { (void)lease.Read(0, lq::Tensor::kKeys, 2); }), LQ_INVALID_ARGUMENT);
}

TEST(FacadeSchema, CarriesWhatAModelFixes) {
  // Every RoPE type, against the schema that the library makes of the same fields.
  const std::vector<lq::Rope> ropes = {{.theta = 5e5, .dims = 32, .interleaved = true},
                                       {.type = "linear", .factor = 4},
                                       {.type = "llama3",
                                        .theta = 5e5,
                                        .factor = 8,
                                        .original_max_positions = 8192,
                                        .low_freq_factor = 1,
                                        .high_freq_factor = 4},
                                       {.type = "yarn",
                                        .factor = 4,
                                        .original_max_positions = 32,
                                        .beta_fast = 32,
                                        .beta_slow = 1,
                                        .truncate = false,
                                        .attention_factor = 1.25}};
  for (const lq::Rope& r : ropes) {
    CacheShape shape{.num_layers = 3, .num_kv_heads = 2, .head_dim = 64, .rope = {}, .windows = {0, 256, 0}};
    shape.rope = {.type = r.type,
                  .theta = r.theta,
                  .dims = r.dims == 0 ? 64 : r.dims,
                  .pairing = r.interleaved ? RopePairing::kInterleaved : RopePairing::kHalfSplit,
                  .factor = r.factor == 0 ? 1 : r.factor,
                  .original_max_positions = r.original_max_positions,
                  .low_freq_factor = r.low_freq_factor,
                  .high_freq_factor = r.high_freq_factor,
                  .beta_fast = r.beta_fast,
                  .beta_slow = r.beta_slow,
                  .truncate = r.truncate,
                  .attention_factor = r.attention_factor == 0 ? 1 : r.attention_factor};
    const lq::Schema mine("kivi2", {.num_layers = 3,
                                    .num_kv_heads = 2,
                                    .head_dim = 64,
                                    .rope = r,
                                    .windows = {0, 256, 0},
                                    .kv_heads = {},
                                    .head_dims = {}});
    EXPECT_EQ(mine.Digest(), Digest(*PresetSchema("kivi2", shape))) << r.type;
    EXPECT_EQ(mine.Layer(1).window, 256);
  }
  std::string why;
  const auto rope = [&](const lq::Rope& r) {
    return StatusOf([&] { lq::Schema("f16", {.num_layers = 1, .num_kv_heads = 1, .head_dim = 64, .rope = r}); }, &why);
  };
  EXPECT_EQ(rope({.type = "dynamic"}), LQ_UNSUPPORTED);
  EXPECT_EQ(rope({.type = "linear"}), LQ_OK) << "a factor of 1 is within what linear allows";
  EXPECT_EQ(rope({.factor = 2}), LQ_INVALID_ARGUMENT);
  EXPECT_THAT(why, HasSubstr("rope.factor"));
  EXPECT_EQ(rope({.type = "llama3", .factor = 8}), LQ_INVALID_ARGUMENT);
  EXPECT_THAT(why, HasSubstr("original_max_positions"));
}

TEST(FacadeSchema, LayersNeedNotBeAlike) {
  const lq::Shape shape{.num_layers = 3, .kv_heads = {2, 1, 2}, .head_dims = {64, 128, 64}};
  const lq::Schema schema(R"({"version": 1, "base": "kivi2", "layers": [{"layers": "2", "base": "int8"}]})", shape);
  EXPECT_EQ(schema.Layer(0).head_dim, 64);
  EXPECT_EQ(schema.Layer(1).head_dim, 128);
  EXPECT_EQ(schema.Layer(1).num_kv_heads, 1);
  lq::Cache cache(schema, {.max_len = 300, .max_q_heads = 4});
  const lq::Sequence seq = cache.Open();
  Rng rng(3);
  lq::Step step = cache.Begin(seq, 200);
  for (int layer = 0; layer < 3; ++layer) {
    const lq_layer l = schema.Layer(layer);
    const int64_t width = int64_t{l.num_kv_heads} * l.head_dim;
    const std::vector<float> rows = Normal(rng, 200 * width);
    std::vector<float> out(static_cast<size_t>(200) * 4 * l.head_dim);
    step.Prepare(layer, rows, rows);
    step.Attend(layer, Normal(rng, 200 * 4 * int64_t{l.head_dim}), 4, 0.1f, out);
    EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](float x) { return std::abs(x) < 10; }));
  }
  step.Publish();
  // Layer 2 alone keeps its keys in int8: one scale a row and head.
  EXPECT_EQ(seq.Acquire().ReadArray(2, lq::Tensor::kKeys, LQ_CODES).shape[2], 64);
  EXPECT_EQ(seq.Acquire().ReadArray(0, lq::Tensor::kKeys, LQ_CODES).shape[2], 16);
  EXPECT_EQ(seq.Acquire().ReadArray(1, lq::Tensor::kKeys, LQ_CODES).shape[2], 32);

  std::string why;
  const auto made = [&](const lq::Shape& s) { return StatusOf([&] { lq::Schema("kivi2", s); }, &why); };
  EXPECT_EQ(made({.num_layers = 2, .num_kv_heads = 1, .head_dims = {64, 80}}), LQ_UNSUPPORTED);
  EXPECT_THAT(why, HasSubstr("layer 1's geometry"));
  EXPECT_EQ(made({.num_layers = 2, .num_kv_heads = 1, .head_dim = 64, .head_dims = {64, 64}}), LQ_INVALID_ARGUMENT);
  EXPECT_EQ(made({.num_layers = 2, .num_kv_heads = 1, .head_dims = {64}}), LQ_INVALID_ARGUMENT);
  EXPECT_THAT(why, HasSubstr("head_dims has 1 values for 2 layers"));
}

TEST(FacadeSchema, AnOlderHeadersStructIsRead) {
  lq_shape shape = {};
  shape.num_layers = 2, shape.num_kv_heads = 2, shape.head_dim = 64, shape.rope_theta = 5e5;
  lq_schema* now = nullptr;
  lq_schema* old = nullptr;
  shape.struct_size = sizeof(shape);
  ASSERT_EQ(lq_schema_create("int4", &shape, &now), LQ_OK);
  // Behind the older struct's end lies anything.
  std::memset(reinterpret_cast<char*>(&shape) + offsetof(lq_shape, rope), 0x5A,
              sizeof(shape) - offsetof(lq_shape, rope));
  shape.struct_size = offsetof(lq_shape, rope);
  ASSERT_EQ(lq_schema_create("int4", &shape, &old), LQ_OK) << lq_last_error();
  EXPECT_STREQ(lq_schema_digest(now), lq_schema_digest(old));
  lq_schema_free(now);
  lq_schema_free(old);
  shape.struct_size = sizeof(shape) + 8;
  EXPECT_EQ(lq_schema_create("int4", &shape, &now), LQ_INVALID_ARGUMENT);
  EXPECT_THAT(lq_last_error(), HasSubstr("struct_size"));
}

}  // namespace
}  // namespace livequant
