// tests/cache/ledger/pool_plan_test.cc: pool plans against a simulation of steps that counts the pages that each step
// holds (cache_core.md 5, begin).
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "cache/ledger/forms.h"
#include "cache/ledger/ledger.h"
#include "support/property.h"

namespace livequant {
namespace {

// Pages of one plane that the private view of a step from `from` to `from + rows` holds; rows 0 = at rest.
int64_t PagesHeld(const LayerClass& cls, int tensor, int form, int64_t from, int64_t rows, bool drafts) {
  const Closure& c = cls.closure[tensor];
  const int64_t f = c.frontier(from), to = std::max(f, c.frontier(from + rows)), s = cls.pinned_rows;
  const int64_t page_rows = form == kCoded ? cls.coded_page_rows : cls.exact_page_rows;
  int64_t pages = 0, last = -1;  // rows rise, so a page comes up in one run
  for (int64_t row = 0; row < from + rows; ++row) {
    const bool fresh = row >= from;
    const bool held =
        form == kCoded ? row >= s && row < to : row < s || (fresh ? row >= to || (drafts && !c.immediate()) : row >= f);
    if (held && row / page_rows != last) ++pages, last = row / page_rows;
  }
  return pages;
}

// Rows of a draft step that are granted: no tensor with step > 1 may close a group under a later draft.
int64_t GrantedDrafts(const std::vector<LayerClass>& classes, int64_t from, int64_t rows) {
  for (; rows > 1; --rows) {
    bool fine = true;
    for (const LayerClass& cls : classes)
      for (const Closure& c : cls.closure) fine = fine && (c.step == 1 || c.raw(from + rows - 1) <= from);
    if (fine) break;
  }
  return rows;
}

// Whether a pool of `pages` can take the step.
bool Takes(const CacheSchema& schema, const std::vector<int64_t>& pages, int64_t from, int64_t rows, bool drafts) {
  const std::vector<LayerClass> classes = LayerClasses(schema);
  for (size_t c = 0; c < classes.size(); ++c)
    for (int t = 0; t < 2; ++t)
      for (int form = 0; form < 2; ++form)
        if (PagesHeld(classes[c], t, form, from, rows, drafts) > pages[c * 4 + static_cast<size_t>(t * 2 + form)])
          return false;
  return true;
}

CacheSchema Mixed() {
  CacheSchema schema = Forms("kivi2", 3, 2, 64);
  schema.layers[0] = FormLayer("f16", 2, 64);
  schema.layers[2] = FormLayer("qserve4", 2, 64);
  return schema;
}

TEST(PoolPlan, HoldsEveryStepUpToItsLength) {
  for (const std::string& name : FormNames()) {
    SCOPED_TRACE(name);
    CacheSchema schema = Forms(name, 1, 1, 32);
    ForAll(30, [&](Rng& rng) {
      schema.layers[0].pinned_rows = rng.Chance(0.5) ? 0 : static_cast<int>(rng.Range(1, 140));
      const int64_t tokens = rng.Range(1, 900), most = rng.Pick({1, 5, 64, 512});
      const std::vector<int64_t> pages = PagesFor(schema, tokens, 1, static_cast<int>(most));
      for (int i = 0; i < 40; ++i) {
        const int64_t from = rng.Range(0, tokens - 1);
        const int64_t rows = rng.Range(1, std::min(most, tokens - from));
        EXPECT_TRUE(Takes(schema, pages, from, rows, false)) << from << " + " << rows << " of " << tokens;
        const int64_t drafts = GrantedDrafts(LayerClasses(schema), from, rows);
        EXPECT_TRUE(Takes(schema, pages, from, drafts, true)) << from << " + " << drafts << " drafts of " << tokens;
      }
    });
  }
}

TEST(PoolPlan, IsNotMoreThanTheWorstStep) {
  for (const std::string& name : FormNames()) {
    SCOPED_TRACE(name);
    const CacheSchema schema = Forms(name, 1, 1, 32);
    const std::vector<LayerClass> classes = LayerClasses(schema);
    const std::vector<int64_t> pages = PagesFor(schema, 1200, 1, 512);
    for (int t = 0; t < 2; ++t)
      for (int form = 0; form < 2; ++form) {
        int64_t worst = 0;
        for (int64_t from = 256; from < 512; ++from)
          for (int64_t rows = 1; rows <= 512; rows += 7) {
            worst = std::max(worst, PagesHeld(classes[0], t, form, from, rows, false));
            if (form == kExact && rows == 1) {
              const int64_t drafts = GrantedDrafts(classes, from, 512);
              worst = std::max(worst, PagesHeld(classes[0], t, form, from, drafts, true));
            }
          }
        const int64_t plan = pages[static_cast<size_t>(t * 2 + form)];
        if (form == kExact) {
          EXPECT_EQ(plan, worst) << (t == 0 ? "k" : "v");
        } else {
          EXPECT_EQ(plan, (classes[0].closure[t].frontier(1200) + 127) / 128) << (t == 0 ? "k" : "v");
        }
      }
  }
}

// What the command line promises: the number of tokens that it prints goes in, one by one or in chunks, and the next
// row does not.
TEST(PoolPlan, TokensThatFitGoInAndTheNextRowIsRefused) {
  std::vector<std::pair<std::string, CacheSchema>> cases;
  for (const std::string& name : FormNames()) cases.emplace_back(name, Forms(name, 2, 1, 32));
  cases.emplace_back("mixed", Mixed());
  CacheSchema pinned = Forms("kivi4", 2, 1, 32);
  for (LayerSchema& layer : pinned.layers) layer.pinned_rows = 37;
  cases.emplace_back("pinned", pinned);
  for (const auto& [name, schema] : cases) {
    SCOPED_TRACE(name);
    const int64_t smallest = PoolBytes(schema, PagesFor(schema, 1, 1, 512));
    EXPECT_EQ(TokensThatFit(schema, smallest - 1, 512), 0);
    EXPECT_EQ(TokensThatFit(schema, 0, 512), 0);
    EXPECT_EQ(TokensThatFit(schema, -1, 512), 0);
    ForAll(12, [&](Rng& rng) {
      const int step = rng.Pick({1, 100, 512});
      const int64_t bytes = rng.Range(smallest, 40 * smallest);
      const int64_t tokens = TokensThatFit(schema, bytes, step);
      const std::vector<int64_t> pages = PagesFor(schema, tokens, 1, step);
      ASSERT_GE(tokens, 1);
      EXPECT_LE(PoolBytes(schema, pages), bytes);
      EXPECT_GT(PoolBytes(schema, PagesFor(schema, tokens + 1, 1, step)), bytes);
      for (int64_t from = std::max<int64_t>(0, tokens - 200); from < tokens; ++from)
        EXPECT_TRUE(Takes(schema, pages, from, 1, false)) << from << " of " << tokens;
      EXPECT_FALSE(Takes(schema, pages, tokens, 1, false)) << "row " << tokens << " went in";
      for (int64_t from = 0; from < tokens; from += step)
        EXPECT_TRUE(Takes(schema, pages, from, std::min<int64_t>(step, tokens - from), false))
            << from << " of " << tokens;
    });
  }
}

TEST(PoolPlan, RisesInEveryArgument) {
  ForAll(300, [](Rng& rng) {
    CacheSchema schema =
        rng.Chance(0.3) ? Mixed() : Forms(FormNames()[static_cast<size_t>(rng.Range(0, 12))], 1, 1, 32);
    for (LayerSchema& layer : schema.layers) {
      if (rng.Chance(0.3)) layer.pinned_rows = static_cast<int>(rng.Range(1, 200));
      if (rng.Chance(0.3)) layer.window = static_cast<int>(rng.Range(256, 600));
    }
    ASSERT_TRUE(Validate(schema).ok());
    const int64_t tokens = rng.Range(0, 1500), sequences = rng.Range(0, 40), step = rng.Range(1, 600);
    const std::vector<int64_t> pages = PagesFor(schema, tokens, sequences, static_cast<int>(step));
    const int64_t more[3] = {rng.Range(0, 1) * rng.Range(0, 300), rng.Range(0, 3), rng.Range(0, 100)};
    const std::vector<int64_t> bigger =
        PagesFor(schema, tokens + more[0], sequences + more[1], static_cast<int>(step + more[2]));
    for (size_t i = 0; i < pages.size(); ++i) EXPECT_LE(pages[i], bigger[i]) << "plane " << i;
  });
}

TEST(PoolPlan, SpreadsOneStepOverManySequences) {
  ForAll(60, [](Rng& rng) {
    const CacheSchema schema = Forms(rng.Chance(0.5) ? "kivi2" : "kivi2_sync", 1, 1, 32);
    const LayerClass cls = LayerClasses(schema)[0];
    const int64_t sequences = rng.Range(1, 12), step = rng.Pick({8, 64, 512}), tokens = 800;
    const std::vector<int64_t> pages = PagesFor(schema, tokens, sequences, static_cast<int>(step));
    for (int i = 0; i < 30; ++i) {
      int64_t left = step, held[2] = {0, 0};
      for (int64_t q = 0; q < sequences; ++q) {
        // Lengths just below a closure are the dear ones.
        const int64_t from = rng.Chance(0.7) ? 128 * rng.Range(1, 4) - rng.Range(1, 2) : rng.Range(0, tokens - 1);
        const int64_t rows =
            std::min({left, tokens - from, rng.Pick({int64_t{0}, int64_t{1}, int64_t{2}, int64_t{40}, int64_t{300}})});
        left -= rows;
        for (int t = 0; t < 2; ++t) held[t] += PagesHeld(cls, t, kExact, from, rows, false);
      }
      EXPECT_LE(held[kK], pages[1]);
      EXPECT_LE(held[kV], pages[3]);
    }
  });
}

TEST(PoolPlan, SequencesThatFit) {
  for (const std::string& name : FormNames()) {
    SCOPED_TRACE(name);
    const CacheSchema schema = Forms(name, 2, 2, 64);
    for (const int64_t tokens : {1, 100, 127, 128, 129, 1000}) {
      const int64_t one = PoolBytes(schema, PagesFor(schema, tokens, 1, 512));
      EXPECT_EQ(SequencesThatFit(schema, one - 1, tokens, 512), 0);
      const int64_t bytes = 7 * one + 3;
      const int64_t n = SequencesThatFit(schema, bytes, tokens, 512);
      EXPECT_GE(n, 7) << "transients are shared, rows are not";
      const std::vector<int64_t> pages = PagesFor(schema, tokens, n, 512);
      EXPECT_LE(PoolBytes(schema, pages), bytes);
      // One sequence more has no room at rest.
      bool room = true;
      for (int t = 0; t < 2; ++t)
        for (int form = 0; form < 2; ++form)
          room = room && (n + 1) * PagesHeld(LayerClasses(schema)[0], t, form, tokens, 0, false) <=
                             pages[static_cast<size_t>(t * 2 + form)];
      EXPECT_FALSE(room) << tokens << " tokens, " << n << " sequences";
    }
  }
}

TEST(PoolPlan, WindowsBoundThePool) {
  CacheSchema schema = Forms("f16", 2, 1, 32);
  for (LayerSchema& layer : schema.layers) layer.window = 300;
  EXPECT_EQ(PagesFor(schema, 1 << 20, 1, 64), PagesFor(schema, 1 << 30, 1, 64));
  EXPECT_EQ(TokensThatFit(schema, PoolBytes(schema, PagesFor(schema, 1 << 20, 1, 64)), 64), kMaxLedgerTokens);
}

TEST(PoolPlan, SumsBeyondInt64AreSaidSo) {
  const CacheSchema schema = Forms("f16", 32, 8, 128);
  EXPECT_EQ(PoolBytes(schema, std::vector<int64_t>{int64_t{1} << 60, 0, 0, 0}), std::numeric_limits<int64_t>::max());
}

}  // namespace
}  // namespace livequant
