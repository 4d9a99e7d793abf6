// What the pool says it holds is what the process holds.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>

#include "kv/kv_support.h"
#include "method/method.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LQ_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define LQ_SANITIZED 1
#endif
#endif

namespace livequant {
namespace {

int64_t ResidentBytes() {
  long long total = 0, resident = 0;
  FILE* f = std::fopen("/proc/self/statm", "r");
  if (f == nullptr || std::fscanf(f, "%lld %lld", &total, &resident) != 2) resident = -1;
  if (f != nullptr) std::fclose(f);
  return resident * sysconf(_SC_PAGESIZE);
}

TEST(Memory, ResidentBytesAgreeWithThePool) {
#ifdef LQ_SANITIZED
  GTEST_SKIP() << "a sanitizer's shadow is resident too";
#endif
  // 4 layers x 8 heads x 128 values x f32, K and V: 32 KiB a row; 8192 rows are 256 MiB.
  auto schema = PresetSchema("f32", {.num_layers = 4, .num_kv_heads = 8, .head_dim = 128, .rope = {}});
  ASSERT_TRUE(schema.ok()) << schema.status().ToString();
  constexpr int64_t kRows = 8192;
  KvOptions options;
  options.max_len = kRows;
  options.max_step_rows = 512;
  options.max_q_heads = 8;
  auto cache = KvCache::Open(*schema, options);
  ASSERT_TRUE(cache.ok()) << cache.status().ToString();
  ThreadPool pool(2);
  auto seq = (*cache)->owner().Open();
  ASSERT_TRUE(seq.ok());
  std::vector<float> k(512 * 1024, 1.0f), v(512 * 1024, 2.0f);
  const auto append = [&](int rows) {
    const AppendRequest request{seq->seq, rows};
    auto step = (*cache)->Begin({&request, 1});
    ASSERT_TRUE(step.ok()) << step.status().ToString();
    for (int layer = 0; layer < 4; ++layer) ASSERT_TRUE(step->Prepare(layer, k.data(), v.data(), pool).ok());
    ASSERT_TRUE(step->Publish().ok());
  };
  append(128);  // whatever a first step touches besides pages
  const int64_t resident = ResidentBytes(), used = (*cache)->owner().used_bytes();
  ASSERT_GT(resident, 0);
  for (int64_t at = 128; at < kRows; at += 384) append(static_cast<int>(std::min<int64_t>(384, kRows - at)));
  const double grown = static_cast<double>(ResidentBytes() - resident);
  const double held = static_cast<double>((*cache)->owner().used_bytes() - used);
  EXPECT_EQ((*cache)->owner().used_bytes(), int64_t{256} << 20);
  EXPECT_NEAR(grown / held, 1.0, 0.01);
}

}  // namespace
}  // namespace livequant
