// Sentences of cache/pages/page_pool.h.
#include "cache/pages/page_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>

#include "base/rng.h"
#include "support/property.h"

namespace livequant {
namespace {

TEST(PagePool, APageIsFreeIffItHasNoReference) {
  ForAll(200, [](Rng& rng) {
    auto made = PagePool::Create(rng.Range(1, 20), 64 * rng.Range(0, 3), 8);
    ASSERT_TRUE(made.ok());
    PagePool& pool = **made;
    std::map<uint32_t, uint32_t> refs;  // the model
    for (int i = 0; i < 300; ++i) {
      if (pool.free_pages() > 0 && rng.Chance(0.4)) {
        const uint32_t page = pool.Take();
        ASSERT_FALSE(refs.contains(page)) << "page " << page << " was handed out twice";
        ASSERT_EQ(pool.meta(page).mark, 0);
        refs[page] = 1;
      } else if (!refs.empty()) {
        auto it = refs.begin();
        std::advance(it, rng.Range(0, static_cast<int64_t>(refs.size()) - 1));
        if (rng.Chance(0.4)) {
          pool.Ref(it->first);
          ++it->second;
        } else {
          pool.set_mark(it->first, static_cast<int>(rng.Range(0, 8)));
          pool.Unref(it->first);
          if (--it->second == 0) refs.erase(it);
        }
      }
      ASSERT_EQ(pool.used_pages(), static_cast<int64_t>(refs.size()));
      ASSERT_EQ(pool.used_bytes(), static_cast<int64_t>(refs.size()) * pool.page_bytes());
      for (const auto& [page, count] : refs) ASSERT_EQ(pool.meta(page).refs, count);
    }
  });
}

TEST(PagePool, PoisonFillsEverySlotOfItsPageAlone) {
  auto made = PagePool::Create(3, 128, 4);
  ASSERT_TRUE(made.ok());
  PagePool& pool = **made;
  const uint32_t a = pool.Take(), b = pool.Take(), c = pool.Take();
  for (const uint32_t page : {a, b, c}) std::fill_n(pool.data(page), 128, std::byte{7});
  pool.Poison(b);
  for (int i = 0; i < 128; ++i) {
    EXPECT_EQ(pool.data(a)[i], std::byte{7});
    EXPECT_EQ(pool.data(b)[i], std::byte{0xFF});
    EXPECT_EQ(pool.data(c)[i], std::byte{7});
  }
}

TEST(PagePool, APoolWithoutMemoryCountsTheSameBytes) {
  auto made = PagePool::Create(4, 1 << 20, 32, /*allocate=*/false);
  ASSERT_TRUE(made.ok());
  EXPECT_EQ((*made)->base(), nullptr);
  (*made)->Poison((*made)->Take());
  EXPECT_EQ((*made)->used_bytes(), 1 << 20);
}

TEST(PagePool, RefusalsNameTheValueAndTheLimit) {
  const auto code = [](int64_t pages, int64_t bytes, int rows) {
    return PagePool::Create(pages, bytes, rows).status().code();
  };
  EXPECT_EQ(code(-1, 64, 8), Code::kInvalidArgument);
  EXPECT_EQ(code(1, -64, 8), Code::kInvalidArgument);
  EXPECT_EQ(code(1, 64, 0), Code::kInvalidArgument);
  EXPECT_EQ(code(1, 64, 65536), Code::kInvalidArgument);
  EXPECT_EQ(code(int64_t{1} << 32, 0, 8), Code::kOutOfRange);
  EXPECT_EQ(code(int64_t{1} << 31, int64_t{1} << 40, 8), Code::kOutOfRange);
  const Status status = PagePool::Create(1 << 30, int64_t{1} << 32, 8).status();  // 2^62 bytes: no machine maps them
  EXPECT_EQ(status.code(), Code::kOutOfRange);
  EXPECT_NE(status.message().find("1073741824 pages of 4294967296 bytes"), std::string::npos) << status.ToString();
  EXPECT_TRUE(PagePool::Create(0, 64, 8).ok());
}

TEST(PagePoolDeathTest, AReferenceTooFewEndsTheProcess) {
  auto made = PagePool::Create(2, 64, 4, false);
  ASSERT_TRUE(made.ok());
  const uint32_t page = (*made)->Take();
  (*made)->Unref(page);
  EXPECT_DEATH((*made)->Unref(page), "invariant broken");
  EXPECT_DEATH((*made)->Ref(page), "invariant broken");
}

}  // namespace
}  // namespace livequant
