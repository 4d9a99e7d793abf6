// The bits of an output row depend on that query, its position and the rows it reads: on nothing else (P21, P24).
#include <atomic>
#include <cstdlib>
#include <new>

#include "attention/attention.h"
#include "attention/pager.h"
#include "kernels/cpu/targets.h"
#include "support/effort.h"

#include "hwy/targets.h"

namespace {
std::atomic<int64_t> g_allocations{0};
}
// Not inlined: GCC would see free() meet a new-expression and warn.
[[gnu::noinline]] void* operator new(size_t n) {
  ++g_allocations;
  if (void* p = std::malloc(n == 0 ? 1 : n)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace livequant {
namespace {

// Rows [first, first + count) of a longer sequence as a step of their own.
TestSequence Cut(const TestSequence& whole, const LayerSchema& layer, int first, int count) {
  TestSequence s;
  s.len = first + count, s.count = count;
  const auto end = static_cast<std::ptrdiff_t>(int64_t{s.len} * layer.num_kv_heads * layer.head_dim);
  s.k.assign(whole.k.begin(), whole.k.begin() + end);
  s.v.assign(whole.v.begin(), whole.v.begin() + end);
  return s;
}
std::vector<float> Slice(const std::vector<float>& x, int64_t width, int64_t first, int64_t count) {
  return {x.begin() + first * width, x.begin() + (first + count) * width};
}

TEST(Invariance, ChunksOfAnySizeGiveTheBitsOfOneShot) {
  for (int format : {1, 2, 6, 8, 10, 12})
    for (bool pre : {false, true}) {
      // 64: where a single query reads native pages in place.
      const int dim = format < 3 ? 64 : 32, kv_heads = 1, heads = 2, len = 700;
      LayerSchema layer =
          MakeLayer(TestFormats(dim)[static_cast<size_t>(format)], kv_heads, dim, pre ? 300 : 0, pre ? 5 : 0);
      if (pre) layer.k_stage = RopeStage::kPre;
      const RopeTable table({}, dim, len);
      Rng rng(7);
      const TestSequence whole = MakeSequence(rng, layer, len, len);
      const std::vector<float> q = MakeQueries(rng, int64_t{len} * heads * dim);
      const std::vector<float> one_shot = TestCache(layer, kStepwise, &table, {whole}, heads, q, rng).Generic();
      for (int chunk : {1, 7, 128, 512}) {
        SCOPED_TRACE(testing::Message() << TestFormats(dim)[static_cast<size_t>(format)].name << " chunk " << chunk);
        // Chunks of one row are many: look at some.
        for (int first = 0; first < len; first += chunk == 1 ? (kInstrumented ? 17 : 3) : chunk) {
          const int count = std::min(chunk, len - first);
          const TestCache cache(layer, kStepwise, &table, {Cut(whole, layer, first, count)}, heads,
                                Slice(q, heads * dim, first, count), rng);
          ExpectSameBits(cache.Generic(), Slice(one_shot, heads * dim, first, count));
          if (testing::Test::HasFailure()) return;
        }
      }
    }
}

TEST(Invariance, NeighboursAndThreadsChangeNoBit) {
  ForAll(40, [](Rng& rng) {
    const int dim = rng.Pick({32, 64}), kv_heads = static_cast<int>(rng.Range(1, 2)),
              heads = kv_heads * static_cast<int>(rng.Range(1, 3));
    const std::vector<TestFormat> formats = TestFormats(dim);
    const LayerSchema layer =
        MakeLayer(formats[static_cast<size_t>(rng.Range(0, static_cast<int64_t>(formats.size()) - 1))], kv_heads, dim,
                  rng.Chance(0.3) ? static_cast<int>(rng.Range(1, 900)) : 0);
    std::vector<TestSequence> sequences;
    std::vector<float> q;
    std::vector<float> alone;
    for (int64_t n = rng.Range(1, 4); n > 0; --n) {
      const int len = static_cast<int>(rng.Range(1, rng.Chance(0.1) ? 5000 : 1500)),
                count = static_cast<int>(rng.Range(1, std::min(len, rng.Chance(0.5) ? 1 : 70)));
      sequences.push_back(MakeSequence(rng, layer, len, count));
      const std::vector<float> mine = MakeQueries(rng, int64_t{count} * heads * dim);
      const std::vector<float> out =
          TestCache(layer, kStepwise, nullptr, {sequences.back()}, heads, mine, rng).Generic();
      q.insert(q.end(), mine.begin(), mine.end());
      alone.insert(alone.end(), out.begin(), out.end());
    }
    const TestCache batch(layer, kStepwise, nullptr, sequences, heads, q, rng);
    for (int threads : {1, 2, 3}) {
      SCOPED_TRACE(testing::Message() << threads << " threads");
      ExpectSameBits(batch.Generic(threads), alone);
    }
  });
}

TEST(Invariance, EveryIsaWithFusedMultiplyAddGivesTheSameBits) {
  const int64_t supported = hwy::SupportedTargets();
  int compared = 0;
  for (const TestFormat& format : TestFormats(96)) {
    Rng rng(11);
    const LayerSchema layer = MakeLayer(format, 1, 96);
    const RopeTable table({}, 96, 600);
    const TestCache cache(layer, kStepwise, &table, {MakeSequence(rng, layer, 600, 40)}, 3,
                          MakeQueries(rng, 40 * 3 * 96), rng);
    std::vector<float> first;
    for (int64_t target : {HWY_AVX3, HWY_AVX2, HWY_NEON}) {
      if ((supported & target) == 0) continue;
      SCOPED_TRACE(testing::Message() << format.name << " on " << hwy::TargetName(target));
      hwy::SetSupportedTargetsForTest(target);
      hwy::GetChosenTarget().Update(hwy::SupportedTargets());
      const std::vector<float> out = cache.Generic();
      if (first.empty())
        first = out;
      else
        ++compared;
      ExpectSameBits(out, first);
    }
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  if (compared == 0) GTEST_SKIP() << "one such ISA here";
}

// P24, and the hot path allocates nothing.
TEST(Workspace, PrefillScratchIsIndependentOfHistoryAndCallsAllocateNothing) {
  const AttentionWorkspace near(1, 512, 8, 128, 1024), far(1, 512, 8, 128, 1 << 20);
  EXPECT_EQ(near.bytes(), far.bytes());
  // With threads, one state of 130 floats a leaf, head and thread comes on top.
  const AttentionWorkspace shared(2, 512, 8, 128, 1 << 20), shared_near(2, 512, 8, 128, 1 << 19);
  EXPECT_EQ(shared.bytes() - shared_near.bytes(), int64_t{1 << 19} / kLeafRows * 2 * 8 * (128 + 2) * 4);

  Rng rng(13);
  const LayerSchema layer = MakeLayer(TestFormats(64)[9], 2, 64);
  AttentionWorkspace workspace(2, 64, 4, 64, 2048);
  ThreadPool pool(2);
  for (int count : {1, 64}) {
    const TestCache cache(layer, kStepwise, nullptr, {MakeSequence(rng, layer, 1500, count)}, 4,
                          MakeQueries(rng, int64_t{count} * 4 * 64), rng);
    std::vector<float> out(cache.out_size());
    const AttentionCall call = cache.Call(out.data());
    AttendGeneric(call, workspace, pool);
    const int64_t before = g_allocations, bytes = workspace.bytes();
    AttendGeneric(call, workspace, pool);
    EXPECT_EQ(g_allocations - before, 0);
    EXPECT_EQ(workspace.bytes(), bytes);
  }
}

}  // namespace
}  // namespace livequant
