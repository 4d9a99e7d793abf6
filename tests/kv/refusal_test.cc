// Everything that can be refused is refused whole: the state and the pool are as they were, and the next append works
// (P14, R2).
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cache/ledger/ledger.h"
#include "kv/kv_support.h"

namespace livequant {
namespace {

using ::testing::Test;

class RefusalTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Cases, RefusalTest, ::testing::ValuesIn(CaseNames()), CaseTestName);

// Prepares every layer of a one-sequence step, with `spoil(layer, k, v)` called before each.
template <class Spoil>
Status PrepareAll(Harness& h, KvStep& step, std::span<const Id> ids, Spoil spoil) {
  for (int layer = 0; layer < static_cast<int>(h.schema().layers.size()); ++layer) {
    const size_t width = static_cast<size_t>(h.schema().layers[layer].num_kv_heads) * h.schema().layers[layer].head_dim;
    std::vector<float> k(ids.size() * width), v(ids.size() * width);
    for (size_t r = 0; r < ids.size(); ++r) {
      FillRow(ids[r], layer, kK, std::span(k).subspan(r * width, width));
      FillRow(ids[r], layer, kV, std::span(v).subspan(r * width, width));
    }
    spoil(layer, k, v);
    LQ_RETURN_IF_ERROR(step.Prepare(layer, k.data(), v.data(), h.pool()));
  }
  return {};
}

TEST_P(RefusalTest, NonFiniteRowsRefuseTheWholeAppend) {
  constexpr float kInf = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();
  const CacheSchema schema = CaseSchema(GetParam(), 2, 2, 32);
  Harness h(schema);
  const SeqId seq = h.Open(), other = h.Open();
  h.AppendAll(seq, Ids(1, 0, 385), 512, false);
  h.AppendAll(other, Ids(2, 0, 40), 512, false);
  const std::vector<std::byte> before = h.State(seq), other_before = h.State(other);
  const int64_t bytes = h.owner().used_bytes();
  const LedgerBytes census = h.owner().Census();
  const bool f16_rows = schema.layers[1].exact_dtype == DType::kF16;
  for (const float bad : {kNaN, kInf, -kInf, 65520.0f, -1e30f}) {
    if (std::isfinite(bad) && !f16_rows) continue;  // f32 and bf16 hold these
    for (const int tensor : {kK, kV})
      for (const int at : {0, 149}) {
        SCOPED_TRACE(std::to_string(bad) + " in tensor " + std::to_string(tensor) + " row " + std::to_string(at));
        const std::vector<Id> ids = Ids(3, 385, 535);
        // The neighbour in the batch is refused with it.
        const AppendRequest requests[] = {{seq, 150}, {other, 1}};
        auto step = h.cache().Begin(requests);
        ASSERT_TRUE(step.ok()) << step.status().ToString();
        std::vector<Id> all = ids;
        all.push_back(Ids(2, 40, 41)[0]);
        const Status refused = PrepareAll(h, *step, all, [&](int layer, std::vector<float>& k, std::vector<float>& v) {
          if (layer == 1) (tensor == kK ? k : v)[static_cast<size_t>(at) * 64 + 32 + 17] = bad;
        });
        EXPECT_EQ(refused.code(), Code::kNonFinite) << refused.ToString();
        const std::string place = std::string("layer 1 ") + (tensor == kK ? "K" : "V") + ", position " +
                                  std::to_string(385 + at) + ", head 1, channel 17:";
        EXPECT_NE(refused.message().find(place), std::string::npos) << refused.message();
        EXPECT_EQ(h.State(seq), before);
        EXPECT_EQ(h.State(other), other_before);
        EXPECT_EQ(h.owner().used_bytes(), bytes);
        EXPECT_EQ(h.owner().Census(), census);
        h.ExpectSound();
        EXPECT_EQ(step->Publish().status().code(), Code::kFailedTxn);
        EXPECT_EQ(step->Attend(0, nullptr, 2, 1.0f, nullptr, h.pool()).code(), Code::kFailedTxn);
      }
  }
  // The next append works and is what it would have been.
  Harness clean(schema);
  const SeqId same = clean.Open();
  clean.AppendAll(same, Ids(1, 0, 385), 512, false);
  ExpectSameOutputs(h.AppendAll(seq, Ids(1, 385, 437), 52), clean.AppendAll(same, Ids(1, 385, 437), 52));
  EXPECT_EQ(h.State(seq), clean.State(same));
}

// Rows that an encoder might divide by: constant, zero, subnormal, one huge value.
TEST_P(RefusalTest, DegenerateRowsAreStored) {
  const CacheSchema schema = CaseSchema(GetParam(), 1, 1, 32);
  const LayerSchema& layer = schema.layers[0];
  const auto constant = [](float c) { return [c](size_t, size_t) { return c; }; };
  const std::pair<const char*, std::function<float(size_t, size_t)>> kinds[] = {
      {"zero", constant(0.0f)},
      {"constant", constant(1.5f)},
      {"negative constant", constant(-3.0f)},
      {"subnormal", [](size_t r, size_t c) { return 1e-7f * static_cast<float>((r + c) % 3) - 1e-7f; }},
      {"f32 subnormal", constant(1e-40f)},
      {"huge", [](size_t r, size_t c) { return c == r % 32 ? 60000.0f : 1.0f; }}};
  for (const auto& [name, value] : kinds) {
    SCOPED_TRACE(name);
    Harness h(schema);
    const SeqId seq = h.Open();
    const std::vector<Id> ids = Ids(1, 0, 400);
    const AppendRequest request{seq, 400};
    auto step = h.cache().Begin({&request, 1});
    ASSERT_TRUE(step.ok());
    std::vector<float> stored[2];
    const Status prepared = PrepareAll(h, *step, ids, [&](int, std::vector<float>& k, std::vector<float>& v) {
      for (size_t r = 0; r < 400; ++r)
        for (size_t c = 0; c < 32; ++c) k[r * 32 + c] = v[r * 32 + c] = value(r, c);
      stored[kK] = k, stored[kV] = v;
    });
    ASSERT_TRUE(prepared.ok()) << prepared.ToString();
    ASSERT_TRUE(step->Publish().ok());
    auto lease = h.owner().Acquire(seq);
    ASSERT_TRUE(lease.ok());
    for (const TensorIndex t : {kK, kV}) {
      std::vector<float> rows(400 * 32);
      h.cache().ReadRows(*lease, 0, t, 0, rows.data());
      const TensorCoding& coding = t == kK ? layer.k : layer.v;
      for (int64_t i = int64_t{layer.pinned_rows} * 32; i < static_cast<int64_t>(rows.size()); ++i) {
        const double x = stored[t][static_cast<size_t>(i)], got = rows[static_cast<size_t>(i)];
        ASSERT_TRUE(std::isfinite(got));
        if (std::string(name) == "huge") {
          // Half a step of a scale over the whole range, plus an f16 scale and offset; fp8 saturates by definition.
          if (coding.kind == CodeKind::kScaledFp) continue;
          ASSERT_LE(std::abs(got - x), 60000.0 * (coding.kind == CodeKind::kInteger ? 0.51 : 0x1p-8)) << t << " " << i;
        } else {
          ASSERT_LE(std::abs(got - x), std::abs(x) * (coding.kind == CodeKind::kInteger ? 0x1p-10 : 0x1p-3) + 0x1p-13)
              << t << " " << i;
        }
      }
    }
  }
}

TEST(Refusal, ARefusedSmallScaleAbortsTheAppend) {
  CacheSchema schema = CaseSchema("int8", 1, 1, 32);
  schema.layers[0].k.small_scale = SmallScale::kRefuse;
  Harness h(schema);
  const SeqId seq = h.Open();
  h.AppendAll(seq, Ids(1, 0, 10), 10);
  const std::vector<std::byte> before = h.State(seq);
  const AppendRequest request{seq, 3};
  auto step = h.cache().Begin({&request, 1});
  ASSERT_TRUE(step.ok());
  const Status refused = PrepareAll(h, *step, Ids(2, 10, 13), [](int, std::vector<float>& k, std::vector<float>&) {
    for (size_t c = 0; c < 32; ++c) k[32 + c] = 1e-4f;  // row 1: amax / 127 is below 2^-14
  });
  EXPECT_EQ(refused.code(), Code::kOutOfRange) << refused.ToString();
  EXPECT_NE(refused.message().find("layer 0 K"), std::string::npos) << refused.message();
  EXPECT_EQ(h.State(seq), before);
  h.ExpectSound();
  h.AppendAll(seq, Ids(1, 10, 20), 10);
}

TEST(Refusal, MalformedStepsAbortAndSayWhy) {
  Harness h(CaseSchema("kivi2", 2, 1, 32));
  const SeqId seq = h.Open();
  h.AppendAll(seq, Ids(1, 0, 400), 400, false);
  const std::vector<std::byte> before = h.State(seq);
  const auto begin = [&](int rows, Mode mode = Mode::kAll) {
    const AppendRequest request{seq, rows, mode};
    auto step = h.cache().Begin({&request, 1});
    EXPECT_TRUE(step.ok()) << step.status().ToString();
    return std::move(*step);
  };
  std::vector<float> k(32 * 8, 1.0f), v(32 * 8, 1.0f), q(64 * 8, 1.0f), out(64 * 8);
  {  // a layer twice
    KvStep step = begin(2);
    ASSERT_TRUE(step.Prepare(1, k.data(), v.data(), h.pool()).ok());
    const Status twice = step.Prepare(1, k.data(), v.data(), h.pool());
    EXPECT_EQ(twice.code(), Code::kDuplicateLayer) << twice.ToString();
    EXPECT_EQ(step.Prepare(0, k.data(), v.data(), h.pool()).code(), Code::kFailedTxn);
  }
  {  // no such layer
    KvStep step = begin(1);
    const Status none = step.Prepare(2, k.data(), v.data(), h.pool());
    EXPECT_EQ(none.code(), Code::kInvalidArgument);
    EXPECT_NE(none.message().find("layer 2 of 2"), std::string::npos) << none.message();
  }
  {  // a layer is missing
    KvStep step = begin(1);
    ASSERT_TRUE(step.Prepare(0, k.data(), v.data(), h.pool()).ok());
    auto missing = step.Publish();
    EXPECT_EQ(missing.status().code(), Code::kMissingLayer);
    EXPECT_NE(missing.status().message().find("layer 1"), std::string::npos) << missing.status().message();
    EXPECT_EQ(step.Publish().status().code(), Code::kFailedTxn);
  }
  {  // too many rows, or too few of a step that is all or none
    for (const int taken : {0, 1, 3, -1}) {
      KvStep step = begin(2);
      for (int layer : {0, 1}) ASSERT_TRUE(step.Prepare(layer, k.data(), v.data(), h.pool()).ok());
      EXPECT_EQ(step.Publish(std::span(&taken, 1)).status().code(), Code::kInvalidArgument) << taken;
    }
    KvStep step = begin(2);
    for (int layer : {0, 1}) ASSERT_TRUE(step.Prepare(layer, k.data(), v.data(), h.pool()).ok());
    const int two[2] = {2, 2};
    EXPECT_EQ(step.Publish(two).status().code(), Code::kInvalidArgument);
  }
  {  // attention of a layer that is not prepared, or with heads that do not fit, leaves the step usable
    KvStep step = begin(1);
    EXPECT_EQ(step.Attend(0, q.data(), 2, 1.0f, out.data(), h.pool()).code(), Code::kInvalidArgument);
    ASSERT_TRUE(step.Prepare(0, k.data(), v.data(), h.pool()).ok());
    EXPECT_EQ(step.Attend(1, q.data(), 2, 1.0f, out.data(), h.pool()).code(), Code::kInvalidArgument);
    EXPECT_EQ(step.Attend(0, q.data(), 3, 1.0f, out.data(), h.pool()).code(), Code::kInvalidArgument);
    EXPECT_EQ(step.Attend(0, q.data(), 0, 1.0f, out.data(), h.pool()).code(), Code::kInvalidArgument);
    EXPECT_TRUE(step.Attend(0, q.data(), 2, 1.0f, out.data(), h.pool()).ok());
  }
  {  // begin
    EXPECT_EQ(h.cache().Begin({}).status().code(), Code::kInvalidArgument);
    const AppendRequest wide{seq, 513};
    auto refused = h.cache().Begin({&wide, 1});
    EXPECT_EQ(refused.status().code(), Code::kInvalidArgument);
    EXPECT_NE(refused.status().message().find("513"), std::string::npos);
    EXPECT_NE(refused.status().message().find("512"), std::string::npos);
    const AppendRequest twice[] = {{seq, 1}, {seq, 1}};
    EXPECT_FALSE(h.cache().Begin(twice).ok());
  }
  EXPECT_EQ(h.State(seq), before);
  h.ExpectSound();
}

TEST(Refusal, ADroppedStepNeverHappened) {
  Harness h(CaseSchema("kivi2", 1, 1, 32));
  const SeqId seq = h.Open();
  h.AppendAll(seq, Ids(1, 0, 390), 390, false);
  const std::vector<std::byte> before = h.State(seq);
  const int64_t bytes = h.owner().used_bytes();
  for (int i = 0; i < 20; ++i) {
    const StepInput input{seq, Ids(2, 390, 520), i % 2 == 0 ? Mode::kAll : Mode::kPrefix};
    std::vector<std::vector<RowOutput>> outputs;
    ASSERT_TRUE(h.Run({&input, 1}, &outputs).ok());
    EXPECT_EQ(h.owner().used_bytes(), bytes);
    EXPECT_EQ(h.State(seq), before);
  }
  EXPECT_EQ(h.owner().stats().aborts, 20);
  h.ExpectSound();
}

// One sequence of a batch moves on: it alone is refused.
TEST(Refusal, AStaleSequenceDoesNotHoldBackTheOthers) {
  Harness h(CaseSchema("kivi2", 1, 1, 32));
  const SeqId a = h.Open(), b = h.Open(), c = h.Open();
  for (const SeqId s : {a, b, c}) h.AppendAll(s, Ids(s, 0, 400), 400, false);
  for (const Mode mode : {Mode::kAll, Mode::kPrefix}) {
    std::vector<StepInput> inputs;
    for (const SeqId s : {a, b, c}) inputs.push_back({s, Ids(s, h.owner().length(s), h.owner().length(s) + 3), mode});
    std::vector<std::vector<RowOutput>> outputs;
    auto step = h.Run(inputs, &outputs);
    ASSERT_TRUE(step.ok());
    ASSERT_TRUE(h.owner().Truncate(b, 390).ok());
    const std::vector<std::byte> moved = h.State(b);
    const int64_t len = h.owner().length(a);
    auto refused = step->Publish();
    EXPECT_EQ(refused.status().code(), Code::kStale) << refused.status().ToString();
    EXPECT_EQ(h.owner().length(a), len + 3);
    EXPECT_EQ(h.owner().length(c), len + 3);
    EXPECT_EQ(h.State(b), moved);
    auto receipt = h.owner().FindReceipt(step->txn(2));
    ASSERT_TRUE(receipt.ok()) << receipt.status().ToString();
    EXPECT_EQ(receipt->rows, 3);
    EXPECT_EQ(receipt->first, len);
    h.ExpectSound();
    h.AppendAll(b, Ids(b, 390, len + 3), 512, false);
  }
}

// A step whose reply was lost: begun again under its id, its rows are there once.
TEST(Refusal, AnIdThatComesAgainAppendsOnce) {
  Harness h(CaseSchema("kivi2", 2, 1, 32));
  const SeqId seq = h.Open(), other = h.Open();
  h.AppendAll(seq, Ids(1, 0, 200), 200, false);
  const AppendRequest request{.seq = seq, .rows = 1, .id = 5, .content = 99};
  std::vector<float> k(32), v(32);
  const auto prepare = [&](KvStep& step) {
    for (int layer = 0; layer < 2; ++layer) ASSERT_TRUE(step.Prepare(layer, k.data(), v.data(), h.pool()).ok());
  };
  {
    auto dropped = h.cache().Begin({&request, 1});
    ASSERT_TRUE(dropped.ok());
    EXPECT_EQ(h.cache().Begin({&request, 1}).status().code(), Code::kInvalidArgument) << "two steps, one transaction";
    prepare(*dropped);
  }
  auto step = h.cache().Begin({&request, 1});
  ASSERT_TRUE(step.ok()) << step.status().ToString() << ": a step that was dropped leaves its id free";
  prepare(*step);
  const auto published = step->Publish();
  ASSERT_TRUE(published.ok());
  const std::vector<std::byte> state = h.State(seq);
  EXPECT_EQ(h.cache().Begin({&request, 1}).status().code(), Code::kAccepted);
  const AppendRequest rows{.seq = seq, .rows = 1, .id = 5, .content = 98},
      elsewhere{.seq = other, .rows = 1, .id = 5, .content = 99};
  EXPECT_EQ(h.cache().Begin({&rows, 1}).status().code(), Code::kIdMismatch);
  EXPECT_EQ(h.cache().Begin({&elsewhere, 1}).status().code(), Code::kIdMismatch);
  EXPECT_EQ(*h.owner().FindReceipt(5), (*published)[0]);
  EXPECT_EQ(h.State(seq), state);
  EXPECT_EQ(h.owner().length(seq), 201);
  h.ExpectSound();
}

TEST(Refusal, AskingAgainRepeatsTheReceipt) {
  Harness h(CaseSchema("int8", 1, 1, 32));
  const SeqId seq = h.Open();
  const StepInput input{seq, Ids(1, 0, 5)};
  std::vector<std::vector<RowOutput>> outputs;
  auto step = h.Run({&input, 1}, &outputs);
  ASSERT_TRUE(step.ok());
  auto first = step->Publish();
  ASSERT_TRUE(first.ok());
  auto second = step->Publish();
  ASSERT_TRUE(second.ok());
  EXPECT_EQ((*first)[0].txn, (*second)[0].txn);
  EXPECT_EQ((*first)[0].generation, (*second)[0].generation);
  EXPECT_EQ((*second)[0].rows, 5);
  EXPECT_EQ(h.owner().length(seq), 5);
}

// ---- pools that are exactly large enough ----

TEST_P(RefusalTest, APoolForTTokensTakesExactlyTRows) {
  constexpr int kTokens = 512;
  const CacheSchema schema = CaseSchema(GetParam(), 2, 1, 32);
  const int64_t bytes = PoolBytes(schema, PagesFor(schema, kTokens, 1, 1));
  const int64_t fit = TokensThatFit(schema, bytes, 1);
  ASSERT_GE(fit, kTokens);
  KvOptions options;
  options.max_len = fit + 64;  // the length is not what stops it
  options.pool_tokens = fit;
  options.max_step_rows = 1;
  options.max_q_heads = 2;
  options.memory_bytes = bytes;
  auto opened = KvCache::Open(schema, options);
  ASSERT_TRUE(opened.ok()) << opened.status().ToString();
  options.memory_bytes = bytes - 1;
  auto refused = KvCache::Open(schema, options);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kOutOfRange);
  EXPECT_NE(refused.status().message().find(std::to_string(bytes)), std::string::npos) << refused.status().message();
  EXPECT_NE(refused.status().message().find(std::to_string(bytes - 1)), std::string::npos)
      << refused.status().message();

  KvCache& cache = **opened;
  ThreadPool pool(1);
  auto seq = cache.owner().Open();
  ASSERT_TRUE(seq.ok());
  std::vector<float> k(32), v(32);
  const auto append = [&](int64_t position) -> Status {
    const AppendRequest request{seq->seq, 1};
    LQ_ASSIGN_OR_RETURN(KvStep step, cache.Begin({&request, 1}));
    for (int layer : {0, 1}) {
      FillRow(Ids(1, position, position + 1)[0], layer, kK, k);
      FillRow(Ids(1, position, position + 1)[0], layer, kV, v);
      LQ_RETURN_IF_ERROR(step.Prepare(layer, k.data(), v.data(), pool));
    }
    return step.Publish().status();
  };
  for (int64_t p = 0; p < fit; ++p) {
    const Status s = append(p);
    ASSERT_TRUE(s.ok()) << "row " << p << ": " << s.ToString();
  }
  const std::vector<std::byte> before = cache.StateBytes(seq->seq);
  const int64_t used = cache.owner().used_bytes();
  EXPECT_LE(used, bytes);
  const Status full = append(fit);
  EXPECT_EQ(full.code(), Code::kOutOfPages) << full.ToString();
  EXPECT_EQ(cache.StateBytes(seq->seq), before);
  EXPECT_EQ(cache.owner().used_bytes(), used);
  EXPECT_TRUE(cache.owner().CheckInvariants().ok());
  // Room again once rows go.
  ASSERT_TRUE(cache.owner().Truncate(seq->seq, 0).ok());
  EXPECT_TRUE(append(0).ok());
}

// A batch is all or none: when its last sequence does not fit, the first got nothing either.
TEST(Refusal, ABatchThatDoesNotFitTakesNothing) {
  Harness h(CaseSchema("int8", 1, 1, 32), {.sequences = 2, .max_len = 256, .step_rows = 200, .pool_tokens = 256});
  const SeqId a = h.Open(), b = h.Open();
  h.AppendAll(a, Ids(1, 0, 250), 200, false);
  const int64_t used = h.owner().used_bytes();
  Status full;
  for (int64_t len = 0; full.ok() && len < 256; len += 120) {
    const AppendRequest requests[] = {{a, 1}, {b, 120}};
    auto step = h.cache().Begin(requests);
    full = step.status();
    if (!full.ok()) break;
    step = Status(Code::kCancelled, "drop it");
    h.AppendAll(b, Ids(2, len, len + 120), 120, false);
  }
  EXPECT_EQ(full.code(), Code::kOutOfPages) << full.ToString();
  EXPECT_EQ(h.owner().length(a), 250);
  EXPECT_GE(h.owner().used_bytes(), used);
  h.ExpectSound();
}

TEST(Refusal, AnySplitOfThePoolsRowsFits) {
  ForAll(6, [](Rng& rng) {
    const CacheSchema schema = CaseSchema(rng.Pick({"kivi2", "int8", "kivi2_sync", "mixed"}), 4, 1, 32);
    constexpr int kPool = 900;
    Harness h(schema, {.sequences = 5, .max_len = 640, .step_rows = 64, .threads = 1, .pool_tokens = kPool});
    std::vector<SeqId> seq;
    for (int i = 0; i < 5; ++i) seq.push_back(h.Open());
    int64_t left = kPool;
    while (left > 0 && !HasFailure()) {
      const SeqId s = seq[static_cast<size_t>(rng.Chance(0.6) ? 0 : rng.Range(0, 4))];
      const int64_t len = h.owner().length(s), n = std::min({left, rng.Range(1, 64), 640 - len});
      if (n == 0) continue;
      h.AppendAll(s, Ids(s, len, len + n), 64, false);
      left -= n;
    }
  });
}

TEST(Refusal, OptionsAreChecked) {
  const CacheSchema schema = CaseSchema("int8", 1, 2, 32);
  const KvOptions good{.max_sequences = 1, .max_len = 100, .max_step_rows = 10, .max_q_heads = 4};
  ASSERT_TRUE(KvCache::Open(schema, good).ok());
  const auto refused = [&](const char* name, auto change) {
    KvOptions bad = good;
    change(bad);
    auto cache = KvCache::Open(schema, bad);
    ASSERT_FALSE(cache.ok()) << name;
    EXPECT_EQ(cache.status().code(), Code::kInvalidArgument) << cache.status().ToString();
    EXPECT_NE(cache.status().message().find(name), std::string::npos) << cache.status().message();
  };
  refused("max_sequences", [](KvOptions& o) { o.max_sequences = 0; });
  refused("max_len", [](KvOptions& o) { o.max_len = 0; });
  refused("max_len", [](KvOptions& o) { o.max_len = int64_t{1} << 40; });
  refused("pool_tokens", [](KvOptions& o) { o.pool_tokens = -1; });
  refused("max_step_rows", [](KvOptions& o) { o.max_step_rows = -5; });
  refused("max_q_heads", [](KvOptions& o) { o.max_q_heads = 1; });
  refused("memory_bytes", [](KvOptions& o) { o.memory_bytes = -1; });
  refused("threads", [](KvOptions& o) { o.threads = -1; });
  CacheSchema broken = schema;
  broken.layers[0].k.bits = 5;
  EXPECT_FALSE(KvCache::Open(broken, good).ok());
}

}  // namespace
}  // namespace livequant
