// base/thread_pool.h: every index once, in rising order, and never after the loop has returned.
#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include "support/property.h"

namespace livequant {
namespace {

TEST(ThreadPool, RunsEveryIndexOnceOnAThreadOfThePool) {
  for (int threads = 1; threads <= 6; ++threads) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (int64_t count : {0, 1, 2, 3, 5, 64, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(count));
      std::atomic<int> strangers{0};
      pool.For(count, [&](int64_t i, int thread) {
        runs[static_cast<size_t>(i)].fetch_add(1, std::memory_order_relaxed);
        if (thread < 0 || thread >= threads) strangers.fetch_add(1);
      });
      for (const auto& r : runs) EXPECT_EQ(r.load(), 1);
      EXPECT_EQ(strangers.load(), 0);
    }
  }
}

TEST(ThreadPool, OneThreadOrOneIndexRunsOnTheCaller) {
  ThreadPool one(1), three(3);
  const auto caller = std::this_thread::get_id();
  one.For(50, [&](int64_t, int thread) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    EXPECT_EQ(thread, 0);
  });
  three.For(1, [&](int64_t i, int thread) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    EXPECT_EQ(i, 0);
    EXPECT_EQ(thread, 0);
  });
}

TEST(ThreadPool, EachThreadHasANumberOfItsOwn) {
  ThreadPool pool(3);
  std::vector<int64_t> seen(3, 0);  // written by its thread alone: TSan would tell
  pool.For(10000, [&](int64_t, int thread) { ++seen[static_cast<size_t>(thread)]; });
  EXPECT_EQ(seen[0] + seen[1] + seen[2], 10000);
}

// Plain writes of a loop are read by the caller after it and by other threads in the next loop, without any atomics.
TEST(ThreadPool, ALoopSeesWhatTheLoopBeforeItWrote) {
  ForAll(20, [](Rng& rng) {
    ThreadPool pool(static_cast<int>(rng.Range(1, 5)));
    const int64_t n = rng.Range(1, 300);
    std::vector<int64_t> a(static_cast<size_t>(n), 0), b(a);
    for (int round = 1; round <= 50; ++round) {
      pool.For(n, [&](int64_t i, int) { a[static_cast<size_t>(i)] += round; });
      pool.For(n, [&](int64_t i, int) { b[static_cast<size_t>(i)] = a[static_cast<size_t>(n - 1 - i)]; });
      for (const int64_t v : b) ASSERT_EQ(v, int64_t{round} * (round + 1) / 2);
    }
  });
}

TEST(ThreadPool, ManyShortLoopsWithMoreThreadsThanCores) {
  ThreadPool pool(static_cast<int>(std::thread::hardware_concurrency()) + 4);
  std::atomic<int64_t> sum{0};
  for (int round = 0; round < 3000; ++round) {
    pool.For(7, [&](int64_t i, int) { sum.fetch_add(i, std::memory_order_relaxed); });
  }
  EXPECT_EQ(sum.load(), int64_t{3000} * 21);
}

TEST(ThreadPool, ParkedWorkersAreWokenAgain) {
  ThreadPool pool(2);
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // far beyond the 50 us of spinning
    // Index 0 waits for index 1: only a second thread that really woke up can end this loop.
    std::atomic<bool> other{false};
    pool.For(2, [&](int64_t i, int) {
      if (i == 1) other.store(true);
      while (i == 0 && !other.load()) std::this_thread::yield();
    });
    EXPECT_TRUE(other.load());
  }
}

TEST(ThreadPool, PoolsComeAndGoAndWorkSideBySide) {
  std::atomic<int64_t> sum{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 60; ++round) {
        ThreadPool pool(1 + round % 4);  // some are destroyed before their workers have looked up once
        if (round % 3 != 0) pool.For(20, [&](int64_t i, int) { sum.fetch_add(i, std::memory_order_relaxed); });
      }
    });
  }
  for (auto& c : callers) c.join();
  EXPECT_EQ(sum.load(), int64_t{3} * 40 * 190);
}

// Plain writes before a barrier are read by all threads after it, and nobody is a barrier ahead.
TEST(Team, ABarrierWaitsForAll) {
  for (int threads = 1; threads <= 5; ++threads) {
    ThreadPool pool(threads);
    std::vector<int64_t> count(static_cast<size_t>(threads), 0);
    std::atomic<int> wrong{0};
    for (int region = 0; region < 40; ++region) {
      pool.Together([&](Team& team) {
        EXPECT_EQ(team.threads(), threads);
        for (int round = 1; round <= 30; ++round) {
          ++count[static_cast<size_t>(team.thread())];
          team.Barrier();
          for (const int64_t c : count) wrong += c != region * 30 + round;
          team.Barrier();
        }
      });
    }
    EXPECT_EQ(wrong.load(), 0);
  }
}

// Loops of any size in any order, in one region and in the next; plain writes are seen after each.
TEST(Team, LoopsRunEveryIndexOnceAndSeeTheLoopBefore) {
  ForAll(20, [](Rng& rng) {
    const int threads = static_cast<int>(rng.Range(1, 5));
    ThreadPool pool(threads);
    std::vector<int64_t> counts;
    for (int i = 0; i < 30; ++i) counts.push_back(rng.Chance(0.5) ? rng.Range(0, 2 * threads) : rng.Range(0, 200));
    std::vector<int64_t> runs(200, 0), seen(200, 0);
    std::atomic<int> strangers{0};
    for (int region = 0; region < 3; ++region)
      pool.Together([&](Team& team) {
        for (const int64_t n : counts) {
          team.For(n, [&](int64_t i, int thread) {
            ++runs[static_cast<size_t>(i)];
            strangers += thread != team.thread();
          });
          team.For(n, [&](int64_t i, int) { seen[static_cast<size_t>(i)] = runs[static_cast<size_t>(n - 1 - i)]; });
        }
      });
    for (int64_t i = 0; i < 200; ++i)
      ASSERT_EQ(runs[static_cast<size_t>(i)],
                3 * std::count_if(counts.begin(), counts.end(), [&](int64_t n) { return n > i; }));
    ASSERT_EQ(strangers.load(), 0);
  });
}

TEST(Team, SharesAreEvenAndWhole) {
  ThreadPool pool(3);
  for (int64_t count : {0, 1, 2, 3, 7, 300}) {
    Team::Range share[3];
    pool.Together([&](Team& team) { share[team.thread()] = team.Share(count); });
    EXPECT_EQ(share[0].begin, 0);
    EXPECT_EQ(share[0].end, share[1].begin);
    EXPECT_EQ(share[1].end, share[2].begin);
    EXPECT_EQ(share[2].end, count);
    for (const Team::Range& s : share) EXPECT_LE(std::abs((s.end - s.begin) * 3 - count), 2);
  }
}

TEST(Team, OfOneRunsInline) {
  Team alone;
  int64_t sum = 0;
  alone.For(5, [&](int64_t i, int thread) { sum += i + 100 * thread; });
  alone.Barrier();
  EXPECT_EQ(sum, 10);
}

TEST(Team, ManyBarriersWithMoreThreadsThanCores) {
  ThreadPool pool(static_cast<int>(std::thread::hardware_concurrency()) + 3);
  std::atomic<int64_t> sum{0};
  pool.Together([&](Team& team) {
    for (int round = 0; round < 300; ++round) team.For(7, [&](int64_t i, int) { sum.fetch_add(i); });
  });
  EXPECT_EQ(sum.load(), int64_t{300} * 21);
}

TEST(ThreadPoolDeathTest, LoopsDoNotNest) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(
      {
        ThreadPool pool(2);
        pool.For(2, [&](int64_t, int) { pool.For(2, [](int64_t, int) {}); });
      },
      "invariant broken");
}

}  // namespace
}  // namespace livequant
