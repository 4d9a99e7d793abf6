// Perplexity and divergence: against goldens of another language (make_golden.py), against a naive double model, and
// against themselves.
#include "eval/perplexity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "eval/logits.h"
#include "io/file.h"
#include "model/tiny_llama.h"
#include "support/effort.h"
#include "support/property.h"

namespace livequant {
namespace {

using ::testing::HasSubstr;

const char* kModelDir = LIVEQUANT_SOURCE_DIR "/models/books-7m";

struct Books {
  ModelBundle bundle;
  std::vector<int32_t> tokens;
  Books() {
    auto loaded = ModelBundle::Load(kModelDir);
    EXPECT_TRUE(loaded.ok()) << loaded.status().ToString();
    bundle = *std::move(loaded);
    const auto text = ReadFile(std::string(kModelDir) + "/eval/heldout_books.txt");
    EXPECT_TRUE(text.ok()) << text.status().ToString();
    const auto ids = bundle.tokenizer->Encode(std::string_view(*text).substr(0, 20000), false);
    EXPECT_TRUE(ids.ok()) << ids.status().ToString();
    tokens = *ids;
  }
  std::vector<EvalFormat> Formats(const std::vector<std::string>& names, int read_step = kStepwise) const {
    std::vector<EvalFormat> out;
    for (const std::string& name : names) {
      const auto schema = bundle.Schema(name, {}, read_step);
      EXPECT_TRUE(schema.ok()) << schema.status().ToString();
      out.push_back({name, *schema});
    }
    return out;
  }
};
const Books& TheBooks() {
  static const Books books;
  return books;
}

PerplexityResult MustEval(const Llama& model, std::span<const int32_t> tokens, const std::vector<EvalFormat>& formats,
                          const PerplexityOptions& options) {
  auto result = EvalPerplexity(model, tokens, formats, options);
  EXPECT_TRUE(result.ok()) << result.status().ToString();
  return *std::move(result);
}

// make_golden.py's figures. f32 against f64: the issue asks for 0.1 %, arithmetic gives far less.
TEST(Perplexity, MatchesTheGoldensOfAnotherLanguage) {
  struct Golden {
    PerplexityProtocol protocol;
    int64_t context, tokens, scored;
    double nll;
  };
  const Golden goldens[] = {{PerplexityProtocol::kWindows, 512, 1500, 1500, 3.560106645},
                            {PerplexityProtocol::kWindows, 2048, 2047, 2047, 3.339927156},
                            {PerplexityProtocol::kLlamaCpp, 256, 1100, 508, 3.431154076}};
  const Books& books = TheBooks();
  for (const Golden& g : goldens) {
    if (kInstrumented && g.tokens > 1500) continue;  // the shorter ones reach the same code
    const PerplexityResult r =
        MustEval(*books.bundle.model, books.tokens, books.Formats({"f32"}),
                 {.context = g.context, .protocol = g.protocol, .max_tokens = g.tokens, .threads = 2});
    EXPECT_EQ(r.tokens, g.scored);
    EXPECT_NEAR(r.baseline_nll, g.nll, 1e-5);
    ASSERT_EQ(r.formats.size(), 1u);
    EXPECT_TRUE(r.formats[0].is_baseline);
    EXPECT_EQ(r.formats[0].nll, r.baseline_nll);
    EXPECT_EQ(r.formats[0].mean_kld, 0);
    EXPECT_EQ(r.formats[0].same_top_p, 1);
  }
}

// Both protocols, from the header's words and a double model that shares no line.
TEST(Perplexity, ScoresWhatTheProtocolsSay) {
  ForAll(6, [](Rng& rng) {
    TinyLlama tiny{.head_dim = 32, .vocab = 80};
    tiny.Fill(rng, "F32");
    const TempDir dir;
    tiny.Write(dir.path());
    const auto model = *Llama::Load(dir.path().string());
    const int64_t context = rng.Range(4, 40), count = rng.Range(2 * context, 5 * context);
    std::vector<int32_t> text;
    for (int64_t i = 0; i < count; ++i) text.push_back(static_cast<int32_t>(rng.Range(0, 79)));
    const auto logp = [&](const std::vector<int32_t>& inputs, size_t row, int32_t next) {
      const std::vector<double> all = tiny.Logits(inputs);
      const double* x = all.data() + row * 80;
      double sum = 0;
      for (int i = 0; i < 80; ++i) sum += std::exp(x[i]);
      return x[next] - std::log(sum);
    };
    for (const PerplexityProtocol protocol : {PerplexityProtocol::kWindows, PerplexityProtocol::kLlamaCpp}) {
      double nll = 0;
      int64_t scored = 0;
      if (protocol == PerplexityProtocol::kWindows) {
        for (int64_t p = 0; p < count; ++p) {  // token p, from BOS and the tokens of its piece before it
          std::vector<int32_t> inputs = {0};
          for (int64_t i = p / (context - 1) * (context - 1); i < p; ++i)
            inputs.push_back(text[static_cast<size_t>(i)]);
          nll -= logp(inputs, inputs.size() - 1, text[static_cast<size_t>(p)]);
          ++scored;
        }
      } else {
        std::vector<int32_t> all = {0};
        all.insert(all.end(), text.begin(), text.end());
        for (int64_t chunk = 0; (chunk + 1) * context <= count + 1; ++chunk)
          for (int64_t p = context / 2 + 1; p < context; ++p) {
            std::vector<int32_t> inputs(all.begin() + chunk * context, all.begin() + chunk * context + p);
            inputs[0] = 0;
            nll -= logp(inputs, inputs.size() - 1, all[static_cast<size_t>(chunk * context + p)]);
            ++scored;
          }
      }
      const PerplexityResult r =
          MustEval(*model, text, {{"f32", tiny.F32Schema()}},
                   {.context = context, .protocol = protocol, .prefill_chunk = rng.Range(1, 50)});
      EXPECT_EQ(r.tokens, scored) << ProtocolName(protocol) << " " << context << " " << count;
      EXPECT_NEAR(r.baseline_nll, nll / static_cast<double>(scored), 1e-4) << ProtocolName(protocol);
    }
  });
}

void ExpectSame(const PerplexityResult& a, const PerplexityResult& b) {
  EXPECT_EQ(a.baseline_nll, b.baseline_nll);
  ASSERT_EQ(a.formats.size(), b.formats.size());
  for (size_t i = 0; i < a.formats.size(); ++i) {
    SCOPED_TRACE(a.formats[i].format);
    EXPECT_EQ(a.formats[i].nll, b.formats[i].nll);
    EXPECT_EQ(a.formats[i].mean_kld, b.formats[i].mean_kld);
    EXPECT_EQ(a.formats[i].max_kld, b.formats[i].max_kld);
    EXPECT_EQ(a.formats[i].rms_dp, b.formats[i].rms_dp);
    EXPECT_EQ(a.formats[i].same_top_p, b.formats[i].same_top_p);
  }
}

TEST(Perplexity, DependsOnNeitherThreadsNorPrefillChunk) {
  TinyLlama tiny{.head_dim = 64, .vocab = 200};
  Rng rng(5);
  tiny.Fill(rng, "BF16");
  const TempDir dir;
  tiny.Write(dir.path());
  const auto bundle = ModelBundle::Load(dir.path().string(), ModelBundle::WithTokenizer::kNo);
  ASSERT_TRUE(bundle.ok());
  std::vector<EvalFormat> formats;
  for (const char* name : {"f32", "kivi2", "int4", "qserve8"}) formats.push_back({name, *bundle->Schema(name)});
  std::vector<int32_t> text;
  for (int i = 0; i < 1900; ++i) text.push_back(static_cast<int32_t>(rng.Range(0, 199)));
  const PerplexityResult one = MustEval(*bundle->model, text, formats, {.context = 450, .threads = 1});
  EXPECT_EQ(one.windows, 5);
  EXPECT_EQ(one.tokens, 1900);
  EXPECT_GT(one.formats[1].mean_kld, 0);
  for (const int threads : {2, 3})
    for (const int64_t chunk : {37, 512})
      ExpectSame(one,
                 MustEval(*bundle->model, text, formats, {.context = 450, .prefill_chunk = chunk, .threads = threads}));
}

// The first 1500 tokens of the books. Measured order, and wide gaps where it is asked for.
TEST(Perplexity, MoreBitsMoveTheAnswerLess) {
  if (kInstrumented) GTEST_SKIP() << "about the arithmetic of thousands of tokens, which a sanitizer does not change";
  const Books& books = TheBooks();
  const std::vector<std::string> names = {"bf16", "int8", "kivi4", "fp8_e4m3", "qserve4", "kivi2", "int4"};
  const PerplexityResult r = MustEval(*books.bundle.model, books.tokens, books.Formats(names),
                                      {.context = 751, .max_tokens = 1500, .threads = 2});
  for (size_t i = 0; i < names.size(); ++i) {
    RecordProperty(names[i], std::to_string(r.formats[i].mean_kld));
    EXPECT_GT(r.formats[i].mean_kld, 0) << names[i];
    EXPECT_GT(r.formats[i].same_top_p, 0.5) << names[i];
    EXPECT_EQ(r.formats[i].fallback_calls, 0) << names[i];
  }
  for (size_t i = 0; i + 3 < names.size(); ++i)
    EXPECT_LT(r.formats[i].mean_kld, r.formats[i + 1].mean_kld) << names[i] << " and " << names[i + 1];
  EXPECT_LT(r.formats[4].mean_kld, r.formats[5].mean_kld);
  EXPECT_LT(r.formats[4].mean_kld, r.formats[6].mean_kld);
}

TEST(Perplexity, TheContractIsTheSchemas) {
  const Books& books = TheBooks();
  double kld[3];
  const int steps[] = {kStepwise, 128, kPromptReadStep};
  for (int i = 0; i < 3; ++i) {
    const PerplexityResult r = MustEval(*books.bundle.model, books.tokens, books.Formats({"f32", "kivi2"}, steps[i]),
                                        {.context = 600, .max_tokens = 599, .prefill_chunk = 128});
    EXPECT_EQ(r.contract, ContractName(steps[i]));
    EXPECT_EQ(r.formats[0].is_baseline, steps[i] == kStepwise);
    EXPECT_EQ(r.formats[0].max_kld, 0);  // f32 rows are exact under every contract, whether computed once or twice
    EXPECT_EQ(r.formats[0].min_kld, 0);
    kld[i] = r.formats[1].mean_kld;
  }
  EXPECT_GT(kld[0], kld[1]);
  EXPECT_GT(kld[1], kld[2]);
  EXPECT_LT(kld[2], 1e-5);  // only exact f16 rows are read
}

TEST(Perplexity, BadCallsNameValueAndLimit) {
  TinyLlama tiny{.max_positions = 100};
  Rng rng(6);
  tiny.Fill(rng, "F32");
  const TempDir dir;
  tiny.Write(dir.path());
  const auto model = *Llama::Load(dir.path().string());
  const std::vector<EvalFormat> f32 = {{"f32", tiny.F32Schema()}};
  const std::vector<int32_t> text(50, 3);
  const auto refused = [&](std::span<const int32_t> tokens, const std::vector<EvalFormat>& formats,
                           const PerplexityOptions& o, Code code) {
    const auto r = EvalPerplexity(*model, tokens, formats, o);
    EXPECT_EQ(r.status().code(), code) << r.status().ToString();
    return r.status().message();
  };
  EXPECT_THAT(refused({}, f32, {.context = 10}, Code::kInvalidArgument), HasSubstr("no tokens"));
  EXPECT_THAT(refused(text, {}, {.context = 10}, Code::kInvalidArgument), HasSubstr("no cache formats"));
  EXPECT_THAT(refused(text, f32, {.context = 101}, Code::kOutOfRange), HasSubstr("101"));
  EXPECT_THAT(refused(text, f32, {.context = 1}, Code::kOutOfRange), HasSubstr("1"));
  EXPECT_THAT(refused(text, f32, {.context = 10, .max_tokens = -4}, Code::kInvalidArgument), HasSubstr("-4"));
  EXPECT_THAT(refused(text, f32, {.context = 10, .threads = 0}, Code::kInvalidArgument), HasSubstr("threads is 0"));
  EXPECT_THAT(refused(std::vector<int32_t>{1, 61}, f32, {.context = 10}, Code::kOutOfRange), HasSubstr("61"));
  const std::string few =
      refused(text, f32, {.context = 26, .protocol = PerplexityProtocol::kLlamaCpp}, Code::kInvalidArgument);
  EXPECT_THAT(few, HasSubstr("51"));
  EXPECT_THAT(few, HasSubstr("52"));
  std::vector<EvalFormat> two = {f32[0], {"f32 at once", tiny.F32Schema()}};
  two[1].schema.read_step = 512;
  const std::string contracts = refused(text, two, {.context = 10}, Code::kInvalidArgument);
  EXPECT_THAT(contracts, HasSubstr("stepwise"));
  EXPECT_THAT(contracts, HasSubstr("chunk:512"));
  two[0].schema.layers.pop_back();
  EXPECT_THAT(refused(text, {two[0]}, {.context = 10}, Code::kInvalidArgument), HasSubstr("layers is 1"));
  std::atomic<bool> cancel = true;
  EXPECT_EQ(EvalPerplexity(*model, text, f32, {.context = 10, .cancel = &cancel}).status().code(), Code::kCancelled);
  EXPECT_FALSE(ParseProtocol("strided").ok());
  EXPECT_EQ(*ParseProtocol("llama.cpp"), PerplexityProtocol::kLlamaCpp);
}

TEST(Perplexity, NamesFormatAndWindowWhereTheModelBreaks) {
  TinyLlama tiny;
  Rng rng(7);
  tiny.Fill(rng, "F32");
  tiny.tensors["model.embed_tokens.weight"].values[9 * 48] = std::numeric_limits<float>::infinity();
  const TempDir dir;
  tiny.Write(dir.path());
  const auto model = *Llama::Load(dir.path().string());
  std::vector<int32_t> text(40, 3);
  text[25] = 9;
  const auto r =
      EvalPerplexity(*model, text, std::vector<EvalFormat>{{"f32", tiny.F32Schema()}}, {.context = 11, .threads = 2});
  EXPECT_EQ(r.status().code(), Code::kNonFinite) << r.status().ToString();
}

TEST(Perplexity, ReportsProgressToTheEnd) {
  const Books& books = TheBooks();
  int64_t last = 0, total = 0;
  const PerplexityResult r =
      MustEval(*books.bundle.model, books.tokens, books.Formats({"f32", "f16"}),
               {.context = 64, .max_tokens = 200, .threads = 2, .on_progress = [&](int64_t done, int64_t all) {
                  EXPECT_EQ(done, last + 1);
                  last = done;
                  total = all;
                }});
  EXPECT_EQ(r.windows, 4);
  EXPECT_EQ(last, 8);  // 4 windows, the f32 baseline and f16
  EXPECT_EQ(total, 8);
}

TEST(EvalLogits, GivesRowsInTheOrderAskedAndGreedyTokens) {
  TinyLlama tiny{.max_positions = 64};
  Rng rng(8);
  tiny.Fill(rng, "F32");
  const TempDir dir;
  tiny.Write(dir.path());
  const auto model = *Llama::Load(dir.path().string());
  ThreadPool pool(1);
  std::vector<int32_t> ids;
  for (int i = 0; i < 30; ++i) ids.push_back(static_cast<int32_t>(rng.Range(0, 60)));
  const auto got =
      EvalLogits(*model, tiny.F32Schema(),
                 {.token_ids = ids, .positions = {29, 0, 13, 29}, .generate = 5, .prefill_chunk = 8}, pool);
  ASSERT_TRUE(got.ok()) << got.status().ToString();
  ASSERT_EQ(got->positions.size(), 4u);
  const std::vector<double> want = tiny.Logits(ids);
  for (const PositionLogits& p : got->positions) {
    ASSERT_EQ(p.logits.size(), 61u);
    for (size_t i = 0; i < 61; ++i) EXPECT_NEAR(p.logits[i], want[static_cast<size_t>(p.position) * 61 + i], 1e-3);
  }
  EXPECT_EQ(got->positions[1].position, 0);
  EXPECT_EQ(got->positions[0].logits, got->positions[3].logits);
  ASSERT_EQ(got->generated.size(), 5u);
  for (const int32_t token : got->generated) {  // each is the naive model's choice
    const std::vector<double> all = tiny.Logits(ids);
    EXPECT_EQ(token, std::max_element(all.end() - 61, all.end()) - (all.end() - 61));
    ids.push_back(token);
  }
  const auto last = EvalLogits(*model, tiny.F32Schema(), {.token_ids = {1, 2}}, pool);
  ASSERT_TRUE(last.ok());
  ASSERT_EQ(last->positions.size(), 1u);
  EXPECT_EQ(last->positions[0].position, 1);
}

TEST(EvalLogits, BadRequestsNameValueAndLimit) {
  TinyLlama tiny{.max_positions = 64};
  Rng rng(9);
  tiny.Fill(rng, "F32");
  const TempDir dir;
  tiny.Write(dir.path());
  const auto model = *Llama::Load(dir.path().string());
  ThreadPool pool(1);
  const auto refused = [&](const LogitsRequest& request, Code code) {
    const auto r = EvalLogits(*model, tiny.F32Schema(), request, pool);
    EXPECT_EQ(r.status().code(), code) << r.status().ToString();
    return r.status().message();
  };
  refused({}, Code::kInvalidArgument);
  EXPECT_THAT(refused({.token_ids = {1, 2}, .positions = {2}}, Code::kOutOfRange), HasSubstr("position 2"));
  EXPECT_THAT(refused({.token_ids = {1, 2}, .positions = {-1}}, Code::kOutOfRange), HasSubstr("position -1"));
  EXPECT_THAT(refused({.token_ids = {1, 61}}, Code::kOutOfRange), HasSubstr("61"));
  EXPECT_THAT(refused({.token_ids = {1}, .generate = 64}, Code::kOutOfRange), HasSubstr("64"));
  EXPECT_THAT(refused({.token_ids = {1}, .generate = -1}, Code::kInvalidArgument), HasSubstr("-1"));
}

}  // namespace
}  // namespace livequant
