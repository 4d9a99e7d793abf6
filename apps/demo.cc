// apps/demo.cc: livequant demo: one passage continued through every cache format, then one table of bytes, quality and
// speed.
#include <fmt/format.h>

#include <memory>

#include "apps/console.h"
#include "apps/context.h"
#include "cache/ledger/ledger.h"
#include "eval/perplexity.h"
#include "io/file.h"
#include "method/method.h"
#include "runtime/session.h"

namespace livequant::app {
namespace {

struct DemoFlags {
  std::string model;
  int64_t prompt_tokens = 1024, n = 64, eval_tokens = 16376, context = 2048;
  int threads = 0;
  bool json = false;
};

struct Row {
  std::string format, text;
  int64_t ledger_bytes = 0, cache_bytes = 0, rows = 0;
  double prefill = 0, decode = 0;
};

int Run(const DemoFlags& flags) {
  auto bundle = ModelBundle::Load(flags.model);
  if (!bundle.ok()) return Fail(bundle.status(), kExitFailed);
  const std::string file = flags.model + "/eval/heldout_books.txt";
  auto text = ReadFile(file);
  if (!text.ok()) return Fail(text.status(), kExitFailed);
  auto ids = bundle->tokenizer->Encode(*text, false);
  if (!ids.ok()) return Fail(ids.status(), kExitFailed);
  if (static_cast<int64_t>(ids->size()) < flags.prompt_tokens + flags.eval_tokens)
    return Fail(Status(Code::kOutOfRange, fmt::format("{} has {} tokens, the demo needs {}", file, ids->size(),
                                                      flags.prompt_tokens + flags.eval_tokens)),
                kExitFailed);
  std::vector<int32_t> prompt = {bundle->model->config().bos_token_id};
  prompt.insert(prompt.end(), ids->begin(), ids->begin() + (flags.prompt_tokens - 1));

  ThreadPool pool(ThreadsOrDefault(flags.threads));
  ContextInfo info{.task = "demo",
                   .model = flags.model,
                   .model_digest = bundle->identity.model,
                   .data_hash = Sha256Hex(std::as_bytes(std::span(*text))),
                   .context_length = flags.context,
                   .contract = ContractName(kStepwise),
                   .threads = pool.threads(),
                   .has_seed = true,
                   .seed = 1,
                   .baseline = "f32"};
  std::vector<EvalFormat> formats;
  std::vector<Row> rows;
  if (!flags.json) {
    auto shown = bundle->tokenizer->Decode(std::span(prompt).last(60));
    fmt::print("{} ({} parameters), a passage of {} tokens, continued greedily. It ends:\n\n  ...{}\n\n", flags.model,
               bundle->model->parameters(), flags.prompt_tokens, shown.ok() ? *shown : "");
  }
  for (const std::string& name : PresetNames()) {
    if (Interrupted()) return kExitInterrupted;
    auto schema = bundle->Schema(name);
    if (!schema.ok() && schema.status().code() == Code::kUnsupported) {
      fmt::print(stderr, "left out: {}\n", schema.status().message());
      continue;
    }
    if (!schema.ok()) return Fail(schema.status(), kExitFailed);
    auto session = Session::Open(bundle->model, *schema, {.max_len = flags.prompt_tokens + flags.n}, pool);
    if (!session.ok()) return Fail(session.status(), kExitFailed);
    GenerateParams params{.max_new_tokens = flags.n, .ignore_eos = true, .cancel = &Interrupted()};
    auto g = (*session)->Generate(prompt, params);
    if (!g.ok()) return Fail(g.status(), kExitFailed);
    auto continued = bundle->tokenizer->Decode(g->token_ids);
    if (!continued.ok()) return Fail(continued.status(), kExitFailed);
    rows.push_back({name, *continued, Ledger(*schema, g->cache_rows).total(), g->cache_used_bytes, g->cache_rows,
                    g->prefill_tokens_per_s(), g->decode_tokens_per_s()});
    if (!flags.json) fmt::print("{:<11} {}\n\n", name, *continued);
    info.schemas[name] = *schema;
    formats.push_back({name, *std::move(schema)});
  }

  Progress progress("perplexity");
  PerplexityOptions options{.context = flags.context,
                            .max_tokens = flags.eval_tokens,
                            .threads = pool.threads(),
                            .cancel = &Interrupted(),
                            .on_progress = [&](int64_t done, int64_t total) { progress.Update(done, total); }};
  auto quality = EvalPerplexity(*bundle->model, *ids, formats, options);
  if (!quality.ok()) return Fail(quality.status(), kExitFailed);
  nlohmann::json out = {{"results", nlohmann::json::array()}, {"context", ContextJson(info)}};
  std::vector<std::vector<std::string>> table = {{"format", "bytes/token", "pool bytes", "perplexity", "mean KLD",
                                                  "same top-1 %", "prefill tok/s", "decode tok/s"}};
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& r = rows[i];
    const FormatQuality& q = quality->formats[i];
    const double per_token = static_cast<double>(r.ledger_bytes) / static_cast<double>(r.rows);
    table.push_back({r.format, fmt::format("{:.1f}", per_token), fmt::format("{}", r.cache_bytes),
                     fmt::format("{:.4f}", q.perplexity), fmt::format("{:.2e}", q.mean_kld),
                     fmt::format("{:.2f}", q.same_top_p * 100), fmt::format("{:.0f}", r.prefill),
                     fmt::format("{:.0f}", r.decode)});
    out["results"].push_back({{"format", r.format},
                              {"text", r.text},
                              {"bytes_per_token", per_token},
                              {"cache_bytes", r.cache_bytes},
                              {"perplexity", q.perplexity},
                              {"mean_kld", q.mean_kld},
                              {"same_top_p", q.same_top_p},
                              {"prefill_tokens_per_s", r.prefill},
                              {"decode_tokens_per_s", r.decode}});
  }
  if (flags.json)
    fmt::print("{}\n", out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
  else
    fmt::print(
        "{}\n{} tokens scored at context {}, contract stepwise, KL divergence against the f32 cache; speeds at {} rows "
        "on {} threads.\n",
        Table(table), quality->tokens, flags.context, flags.prompt_tokens, pool.threads());
  return kExitOk;
}

}  // namespace

void AddDemo(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<DemoFlags>();
  flags->model = DefaultModelDir();
  CLI::App* cmd = app.add_subcommand("demo", "a passage continued under every format, then one table");
  cmd->add_option("-m,--model", flags->model, "model directory or GGUF file")->capture_default_str();
  cmd->add_option("-n,--n-predict", flags->n, "new tokens")->check(CLI::Range(1, 4096))->capture_default_str();
  cmd->add_option("--max-tokens", flags->eval_tokens, "tokens scored for perplexity")
      ->check(CLI::Range(16, 1 << 24))
      ->capture_default_str();
  cmd->add_option("-t,--threads", flags->threads, "0 = every core")->check(CLI::Range(0, 1024))->capture_default_str();
  cmd->add_flag("--json", flags->json, "print JSON");
  cmd->callback([flags, exit_code] { *exit_code = Run(*flags); });
}

}  // namespace livequant::app
