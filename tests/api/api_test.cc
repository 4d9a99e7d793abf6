// include/livequant/livequant.h against kv/kv_cache.h: the same rows give the same bytes and outputs; what bad calls
// get.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <livequant/livequant.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "base/rng.h"
#include "kv/kv_cache.h"
#include "method/method.h"

namespace livequant {
namespace {

using ::testing::HasSubstr;

constexpr int kLayers = 2, kKvHeads = 2, kQHeads = 4, kDim = 64;
constexpr int64_t kRow = kKvHeads * kDim, kQRow = kQHeads * kDim, kMaxLen = 400;
constexpr float kScale = 0.125f;
lq_shape Shape() {
  lq_shape s = {};
  s.struct_size = sizeof(s), s.num_layers = kLayers, s.num_kv_heads = kKvHeads, s.head_dim = kDim;
  return s;
}
const lq_shape kShape = Shape();

struct Free {
  void operator()(lq_schema* p) const { lq_schema_free(p); }
  void operator()(lq_cache* p) const { lq_cache_free(p); }
  void operator()(lq_step* p) const { lq_step_free(p); }
  void operator()(lq_lease* p) const { lq_lease_free(p); }
};
template <class T>
using Handle = std::unique_ptr<T, Free>;

Handle<lq_schema> MakeSchema(const std::string& text) {
  lq_schema* schema = nullptr;
  EXPECT_EQ(lq_schema_create(text.c_str(), &kShape, &schema), LQ_OK) << lq_last_error();
  return Handle<lq_schema>(schema);
}

lq_cache_options Options() {
  lq_cache_options o = {};
  o.struct_size = sizeof(o), o.max_sequences = 3, o.max_len = kMaxLen, o.max_q_heads = kQHeads, o.threads = 2;
  return o;
}

Handle<lq_cache> MakeCache(const lq_schema* schema, const lq_cache_options& options) {
  lq_cache* cache = nullptr;
  EXPECT_EQ(lq_cache_create(schema, &options, &cache), LQ_OK) << lq_last_error();
  return Handle<lq_cache>(cache);
}

std::vector<float> Rows(Rng& rng, int64_t n) {
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = static_cast<float>(rng.Normal());
  return x;
}

// A step of `rows` rows with strides that leave gaps (NaN, so that nobody can read them unseen); outputs of all layers.
std::vector<float> Append(lq_cache* cache, lq_seq seq, int rows, uint64_t seed) {
  const lq_append request = {seq, rows, 0};
  lq_step* raw = nullptr;
  EXPECT_EQ(lq_begin(cache, &request, 1, &raw), LQ_OK) << lq_last_error();
  const Handle<lq_step> step(raw);
  Rng rng(seed);
  std::vector<float> all;
  constexpr int64_t kGap = 3;
  const auto spread = [&](const std::vector<float>& x, int64_t width) {
    std::vector<float> y(static_cast<size_t>(rows * (width + kGap)), std::numeric_limits<float>::quiet_NaN());
    for (int r = 0; r < rows; ++r) std::memcpy(&y[r * (width + kGap)], &x[r * width], sizeof(float) * width);
    return y;
  };
  for (int layer = 0; layer < kLayers; ++layer) {
    const auto k = spread(Rows(rng, rows * kRow), kRow), v = spread(Rows(rng, rows * kRow), kRow),
               q = spread(Rows(rng, rows * kQRow), kQRow);
    std::vector<float> out(static_cast<size_t>(rows * (kQRow + kGap)), 7.0f);
    EXPECT_EQ(lq_step_prepare(step.get(), layer, k.data(), kRow + kGap, v.data(), kRow + kGap), LQ_OK);
    EXPECT_EQ(lq_step_attend(step.get(), layer, q.data(), kQRow + kGap, kQHeads, kScale, out.data(), kQRow + kGap),
              LQ_OK);
    for (int r = 0; r < rows; ++r) {
      all.insert(all.end(), out.begin() + r * (kQRow + kGap), out.begin() + r * (kQRow + kGap) + kQRow);
      for (int64_t c = kQRow; c < kQRow + kGap; ++c) EXPECT_EQ(out[static_cast<size_t>(r * (kQRow + kGap) + c)], 7.0f);
    }
  }
  EXPECT_EQ(lq_step_publish(step.get(), nullptr), LQ_OK) << lq_last_error();
  return all;
}

std::vector<float> AppendDirectly(KvCache& cache, SeqId seq, int rows, uint64_t seed, ThreadPool& pool) {
  const AppendRequest request{.seq = seq, .rows = rows};
  auto step = cache.Begin({&request, 1});
  EXPECT_TRUE(step.ok());
  Rng rng(seed);
  std::vector<float> all;
  for (int layer = 0; layer < kLayers; ++layer) {
    auto k = Rows(rng, rows * kRow), v = Rows(rng, rows * kRow);
    const auto q = Rows(rng, rows * kQRow);
    std::vector<float> out(q.size());
    EXPECT_TRUE(step->Prepare(layer, k.data(), v.data(), pool).ok());
    EXPECT_TRUE(step->Attend(layer, q.data(), kQHeads, kScale, out.data(), pool).ok());
    all.insert(all.end(), out.begin(), out.end());
  }
  EXPECT_TRUE(step->Publish().ok());
  return all;
}

std::vector<std::byte> StateOf(lq_cache* cache, lq_seq seq) {
  int64_t bytes = 0;
  EXPECT_EQ(lq_sequence_state(cache, seq, nullptr, 0, &bytes), LQ_OK) << lq_last_error();
  std::vector<std::byte> state(static_cast<size_t>(bytes));
  EXPECT_EQ(lq_sequence_state(cache, seq, state.data(), bytes, &bytes), LQ_OK);
  return state;
}

class Api : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Presets, Api, ::testing::ValuesIn(PresetNames()), [](const auto& info) { return info.param; });

// On the caller's memory, with gaps between rows and two threads, against KvCache on its own memory with one.
TEST_P(Api, GivesTheBytesAndOutputsOfTheCacheItself) {
  const auto schema = MakeSchema(GetParam());
  lq_cache_options options = Options();
  ASSERT_EQ(lq_cache_memory_bytes(schema.get(), &options, &options.memory_bytes), LQ_OK);
  const std::unique_ptr<std::byte, void (*)(std::byte*)> memory(
      static_cast<std::byte*>(
          ::operator new(static_cast<size_t>(options.memory_bytes), std::align_val_t(LQ_MEMORY_ALIGNMENT))),
      [](std::byte* p) { ::operator delete(p, std::align_val_t(LQ_MEMORY_ALIGNMENT)); });
  options.memory = memory.get();
  const auto cache = MakeCache(schema.get(), options);

  CacheShape shape{.num_layers = kLayers, .num_kv_heads = kKvHeads, .head_dim = kDim, .rope = {}};
  shape.rope.dims = kDim;
  const auto same = PresetSchema(GetParam(), shape);
  ASSERT_TRUE(same.ok());
  EXPECT_EQ(lq_schema_digest(schema.get()), Digest(*same));
  auto direct = KvCache::Open(*same, {.max_sequences = 3, .max_len = kMaxLen, .max_q_heads = kQHeads, .threads = 1});
  ASSERT_TRUE(direct.ok());
  ThreadPool one(1);

  lq_seq seq = 0, branch = 0;
  ASSERT_EQ(lq_sequence_open(cache.get(), &seq), LQ_OK);
  const SeqId direct_seq = (*direct)->owner().Open()->seq;
  uint64_t seed = 1;
  for (const int rows : {150, 1, 1, 70, 1, 40}) {
    EXPECT_EQ(Append(cache.get(), seq, rows, seed), AppendDirectly(**direct, direct_seq, rows, seed, one));
    ++seed;
  }
  EXPECT_EQ(StateOf(cache.get(), seq), (*direct)->StateBytes(direct_seq));

  // A branch that is cut and goes on; a lease keeps what was.
  lq_lease* raw = nullptr;
  ASSERT_EQ(lq_lease_acquire(cache.get(), seq, &raw), LQ_OK);
  const Handle<lq_lease> lease(raw);
  ASSERT_EQ(lq_sequence_fork(cache.get(), seq, &branch), LQ_OK);
  const SeqId direct_branch = (*direct)->owner().Fork(direct_seq)->seq;
  ASSERT_EQ(lq_sequence_truncate(cache.get(), branch, 205), LQ_OK);
  ASSERT_TRUE((*direct)->owner().Truncate(direct_branch, 205).ok());
  EXPECT_EQ(Append(cache.get(), branch, 30, 50), AppendDirectly(**direct, direct_branch, 30, 50, one));
  EXPECT_EQ(StateOf(cache.get(), branch), (*direct)->StateBytes(direct_branch));
  int64_t length = 0;
  ASSERT_EQ(lq_sequence_length(cache.get(), branch, &length), LQ_OK);
  EXPECT_EQ(length, 235);
  ASSERT_EQ(lq_sequence_release(cache.get(), seq), LQ_OK);
  EXPECT_EQ(lq_sequence_length(cache.get(), seq, &length), LQ_CLOSED);
  ASSERT_EQ(lq_lease_length(lease.get()), 263);
  const auto direct_lease = (*direct)->owner().Acquire(direct_seq);
  for (int tensor = 0; tensor < 2; ++tensor) {
    std::vector<float> got(263 * kDim), want(got.size());
    ASSERT_EQ(lq_lease_read(lease.get(), 1, tensor, 1, got.data()), LQ_OK);
    (*direct)->ReadRows(*direct_lease, 1, tensor == 0 ? kK : kV, 1, want.data());
    EXPECT_EQ(got, want);
  }
  int64_t used = 0;
  ASSERT_EQ(lq_cache_used_bytes(cache.get(), &used), LQ_OK);
  EXPECT_GT(used, 0);
  EXPECT_LE(used, options.memory_bytes);
}

TEST(ApiErrors, NameTheThingTheValueAndTheLimit) {
  lq_schema* none = nullptr;
  EXPECT_EQ(lq_schema_create("kivi3", &kShape, &none), LQ_NOT_FOUND);
  EXPECT_THAT(lq_last_error(), HasSubstr("kivi2"));
  lq_shape old = kShape;
  old.struct_size = 4;
  EXPECT_EQ(lq_schema_create("f16", &old, &none), LQ_INVALID_ARGUMENT);
  EXPECT_THAT(lq_last_error(), HasSubstr("struct_size is 4"));
  EXPECT_EQ(lq_schema_create("{\"version\": 1, \"base\": \"f16\", \"bass\": 1}", &kShape, &none), LQ_INVALID_ARGUMENT);
  EXPECT_THAT(lq_last_error(), HasSubstr("bass"));
  EXPECT_EQ(lq_schema_create(nullptr, &kShape, &none), LQ_INVALID_ARGUMENT);
  EXPECT_EQ(none, nullptr);

  const auto schema = MakeSchema("{\"version\": 1, \"base\": \"int8\"}");
  lq_cache_options options = Options();
  alignas(LQ_MEMORY_ALIGNMENT) static std::byte small[LQ_MEMORY_ALIGNMENT];
  options.memory = small, options.memory_bytes = sizeof(small);
  lq_cache* no_cache = nullptr;
  EXPECT_EQ(lq_cache_create(schema.get(), &options, &no_cache), LQ_OUT_OF_RANGE);
  EXPECT_THAT(lq_last_error(), HasSubstr("4096"));
  options.memory = small + 1;
  EXPECT_EQ(lq_cache_create(schema.get(), &options, &no_cache), LQ_INVALID_ARGUMENT);
  options.memory = small, options.memory_bytes = 0;
  EXPECT_EQ(lq_cache_create(schema.get(), &options, &no_cache), LQ_INVALID_ARGUMENT);
  EXPECT_EQ(no_cache, nullptr);

  const auto cache = MakeCache(schema.get(), Options());
  lq_seq seq = 0;
  ASSERT_EQ(lq_sequence_open(cache.get(), &seq), LQ_OK);
  Append(cache.get(), seq, 20, 1);
  const std::vector<std::byte> before = StateOf(cache.get(), seq);
  const lq_append request = {seq, 2, 0};
  lq_step* raw = nullptr;
  EXPECT_EQ(lq_begin(cache.get(), &request, 0, &raw), LQ_INVALID_ARGUMENT);
  ASSERT_EQ(lq_begin(cache.get(), &request, 1, &raw), LQ_OK);
  const Handle<lq_step> step(raw);
  EXPECT_EQ(lq_step_rows(step.get()), 2);
  EXPECT_EQ(lq_step_count(step.get(), 0), 2);
  EXPECT_EQ(lq_step_position(step.get(), 0), 20);
  EXPECT_EQ(lq_step_first_row(step.get(), 1), -1);
  std::vector<float> k(2 * kRow, 1.0f), v(2 * kRow, 1.0f), q(2 * kQRow, 1.0f), out(2 * kQRow);
  EXPECT_EQ(lq_step_prepare(step.get(), kLayers, k.data(), kRow, v.data(), kRow), LQ_INVALID_ARGUMENT);
  EXPECT_EQ(lq_step_prepare(step.get(), 0, k.data(), kRow - 1, v.data(), kRow), LQ_INVALID_ARGUMENT);
  EXPECT_THAT(lq_last_error(), HasSubstr("k_stride is 127"));
  EXPECT_EQ(lq_step_attend(step.get(), 0, q.data(), kQRow, kQHeads, kScale, out.data(), kQRow), LQ_INVALID_ARGUMENT);
  ASSERT_EQ(lq_step_prepare(step.get(), 0, k.data(), kRow, v.data(), kRow), LQ_OK);
  EXPECT_EQ(lq_step_attend(step.get(), 0, q.data(), kQRow, kQHeads + 1, kScale, out.data(), kQRow),
            LQ_INVALID_ARGUMENT);
  EXPECT_EQ(lq_step_attend(step.get(), 0, q.data(), kQRow, kQHeads, kScale, out.data(), kQRow), LQ_OK);
  k[5] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(lq_step_prepare(step.get(), 1, k.data(), kRow, v.data(), kRow), LQ_NON_FINITE);
  EXPECT_THAT(lq_last_error(), HasSubstr("channel 5"));
  EXPECT_EQ(lq_step_publish(step.get(), nullptr), LQ_FAILED_STEP);
  EXPECT_EQ(StateOf(cache.get(), seq), before);
}

TEST(ApiDrafts, PublishAPrefix) {
  const auto schema = MakeSchema("kivi4");
  const auto cache = MakeCache(schema.get(), Options());
  lq_seq seq = 0;
  ASSERT_EQ(lq_sequence_open(cache.get(), &seq), LQ_OK);
  Append(cache.get(), seq, 100, 1);
  const lq_append request = {seq, 6, 1};
  lq_step* raw = nullptr;
  ASSERT_EQ(lq_begin(cache.get(), &request, 1, &raw), LQ_OK) << lq_last_error();
  const Handle<lq_step> step(raw);
  const std::vector<float> rows(6 * kRow, 0.5f);
  for (int layer = 0; layer < kLayers; ++layer)
    ASSERT_EQ(lq_step_prepare(step.get(), layer, rows.data(), kRow, rows.data(), kRow), LQ_OK);
  const int32_t accepted = 4;
  ASSERT_EQ(lq_step_publish(step.get(), &accepted), LQ_OK) << lq_last_error();
  int64_t length = 0;
  ASSERT_EQ(lq_sequence_length(cache.get(), seq, &length), LQ_OK);
  EXPECT_EQ(length, 104);
}

TEST(ApiLedger, IsTheLedger) {
  const auto schema = MakeSchema("kivi2_sync");
  lq_ledger bytes;
  ASSERT_EQ(lq_schema_ledger(schema.get(), 4096, &bytes), LQ_OK);
  EXPECT_GT(bytes.codes, 0);
  EXPECT_GT(bytes.decode_read_bytes, bytes.codes);
  EXPECT_EQ(lq_schema_ledger(schema.get(), -1, &bytes), LQ_OUT_OF_RANGE);
}

}  // namespace
}  // namespace livequant
