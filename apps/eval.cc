// apps/eval.cc: livequant eval perplexity | logits.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include <memory>

#include "apps/console.h"
#include "apps/context.h"
#include "eval/logits.h"
#include "eval/perplexity.h"
#include "io/file.h"

namespace livequant::app {
namespace {

struct PerplexityFlags {
  std::string model, file, dtypes = "f16", skip, protocol = "windows", contract;
  int64_t context = 2048, max_tokens = 0, prefill_chunk = 512;
  int threads = 0;
  bool json = false, allow_fallback = false;
};

nlohmann::json QualityJson(const FormatQuality& q) {
  return {{"format", q.format},
          {"contract", q.contract},
          {"tokens", q.tokens},
          {"windows", q.windows},
          {"nll", q.nll},
          {"perplexity", q.perplexity},
          {"perplexity_error", q.perplexity_error},
          {"mean_kld", q.mean_kld},
          {"kld_error", q.kld_error},
          {"median_kld", q.median_kld},
          {"p90_kld", q.p90_kld},
          {"p95_kld", q.p95_kld},
          {"p99_kld", q.p99_kld},
          {"p999_kld", q.p999_kld},
          {"max_kld", q.max_kld},
          {"min_kld", q.min_kld},
          {"mean_dp", q.mean_dp},
          {"rms_dp", q.rms_dp},
          {"same_top_p", q.same_top_p},
          {"thread_seconds", q.seconds},
          {"fallback_calls", q.fallback_calls},
          {"key_spike", SpikeJson(q.key_spike)},
          {"is_baseline", q.is_baseline}};
}

int RunPerplexity(const PerplexityFlags& flags) {
  std::vector<int> skip;
  if (!flags.skip.empty()) {
    auto layers = ParseIntList(flags.skip, "--kv-cache-dtype-skip-layers");
    if (!layers.ok()) return Fail(layers.status(), kExitUsage);
    skip = *layers;
  }
  auto protocol = ParseProtocol(flags.protocol);
  if (!protocol.ok()) return Fail(protocol.status(), kExitUsage);
  auto bundle = ModelBundle::Load(flags.model);
  if (!bundle.ok()) return Fail(bundle.status(), kExitFailed);
  ContextInfo info{.task = "eval perplexity",
                   .model = flags.model,
                   .model_digest = bundle->identity.model,
                   .context_length = flags.context,
                   .threads = ThreadsOrDefault(flags.threads),
                   .baseline = "f32",
                   .allow_fallback = flags.allow_fallback};
  std::vector<EvalFormat> formats;
  for (const std::string& name : Split(flags.dtypes, ',')) {
    auto schema = bundle->Schema(name, skip);
    if (schema.ok() && !flags.contract.empty()) {
      auto read_step = ParseContract(flags.contract);
      if (!read_step.ok()) return Fail(read_step.status(), kExitUsage);
      schema->read_step = *read_step;
    }
    if (schema.ok()) {
      if (auto kernels = KernelsJson(*schema, flags.allow_fallback); !kernels.ok())
        return Fail(kernels.status(), kExitUsage);
      info.schemas[name] = *schema;
      info.contract = ContractName(schema->read_step);
      formats.push_back({name, *std::move(schema)});
    } else {
      return Fail(schema.status(), kExitUsage);
    }
  }
  const std::string file = flags.file.empty() ? flags.model + "/eval/heldout_books.txt" : flags.file;
  auto text = ReadFile(file);
  if (!text.ok()) return Fail(text.status(), kExitUsage);
  auto tokens = bundle->tokenizer->Encode(*text, false);
  if (!tokens.ok()) return Fail(Status(tokens.status().code(), file + ": " + tokens.status().message()), kExitUsage);
  info.data_hash = Sha256Hex(std::as_bytes(std::span(*text)));

  Progress progress("perplexity");
  PerplexityOptions options{.context = flags.context,
                            .protocol = *protocol,
                            .max_tokens = flags.max_tokens,
                            .prefill_chunk = flags.prefill_chunk,
                            .threads = info.threads,
                            .allow_fallback = flags.allow_fallback,
                            .cancel = &Interrupted(),
                            .on_progress = [&](int64_t done, int64_t total) { progress.Update(done, total); }};
  auto result = EvalPerplexity(*bundle->model, *tokens, formats, options);
  if (!result.ok())
    return Fail(result.status(),
                result.status().code() == Code::kInvalidArgument || result.status().code() == Code::kOutOfRange
                    ? kExitUsage
                    : kExitFailed);
  for (const FormatQuality& q : result->formats) {
    info.fallback_calls += q.fallback_calls;
    WarnOfSpike(q.format, q.key_spike);
  }
  if (flags.json) {
    nlohmann::json out = {
        {"results", nlohmann::json::array()},
        {"protocol", ProtocolName(*protocol)},
        {"tokens", result->tokens},
        {"windows", result->windows},
        {"wall_seconds", result->wall_seconds},
        {"baseline", {{"format", "f32"}, {"perplexity", result->baseline_perplexity}, {"nll", result->baseline_nll}}},
        {"context", ContextJson(info)}};
    for (const FormatQuality& q : result->formats) out["results"].push_back(QualityJson(q));
    fmt::print("{}\n", out.dump(2));
    return kExitOk;
  }
  fmt::print(
      "{}: {} tokens in {} windows of {}, protocol {}, contract {}; baseline f32 perplexity {:.5f}; {:.1f} s\n\n", file,
      result->tokens, result->windows, flags.context, ProtocolName(*protocol), result->contract,
      result->baseline_perplexity, result->wall_seconds);
  std::vector<std::vector<std::string>> rows = {{"format", "perplexity", "+-", "mean KLD", "+-", "median", "99 %",
                                                 "max", "mean dp %", "RMS dp %", "same top p %"}};
  for (const FormatQuality& q : result->formats)
    rows.push_back({q.format, fmt::format("{:.5f}", q.perplexity), fmt::format("{:.5f}", q.perplexity_error),
                    fmt::format("{:.3e}", q.mean_kld), fmt::format("{:.1e}", q.kld_error),
                    fmt::format("{:.2e}", q.median_kld), fmt::format("{:.2e}", q.p99_kld),
                    fmt::format("{:.2e}", q.max_kld), fmt::format("{:+.4f}", q.mean_dp * 100),
                    fmt::format("{:.4f}", q.rms_dp * 100), fmt::format("{:.3f}", q.same_top_p * 100)});
  fmt::print("{}", Table(rows));
  return kExitOk;
}

struct LogitsFlags {
  std::string model, ids, dtype = "f32", positions, contract;
  int64_t generate = 0, prefill_chunk = 512;
  int threads = 0;
  bool json = false, allow_fallback = false;
};

// "1,2,3", or a file of ids separated by commas or white space.
Result<std::vector<int32_t>> ReadTokenIds(const std::string& arg) {
  std::string text = arg;
  if (arg.find_first_not_of("0123456789, ") != std::string::npos) {
    LQ_ASSIGN_OR_RETURN(text, ReadFile(arg, 64 << 20));
  }
  std::vector<int32_t> ids;
  size_t at = 0;
  while (true) {
    at = text.find_first_not_of(", \t\r\n[]", at);
    if (at == std::string::npos) return ids;
    size_t end = text.find_first_of(", \t\r\n[]", at);
    if (end == std::string::npos) end = text.size();
    const std::string word = text.substr(at, end - at);
    if (word.size() > 9 || word.find_first_not_of("0123456789") != std::string::npos)
      return Status(Code::kInvalidArgument, fmt::format("--token-ids: '{}' is not a token id", word.substr(0, 40)));
    ids.push_back(static_cast<int32_t>(std::stol(word)));
    at = end;
  }
}

int RunLogits(const LogitsFlags& flags) {
  auto ids = ReadTokenIds(flags.ids);
  if (!ids.ok()) return Fail(ids.status(), kExitUsage);
  LogitsRequest request{.token_ids = *ids,
                        .positions = {},
                        .generate = flags.generate,
                        .prefill_chunk = flags.prefill_chunk,
                        .allow_fallback = flags.allow_fallback};
  if (!flags.positions.empty()) {
    auto positions = ParseIntList(flags.positions, "--positions");
    if (!positions.ok()) return Fail(positions.status(), kExitUsage);
    request.positions.assign(positions->begin(), positions->end());
  }
  auto bundle = ModelBundle::Load(flags.model, ModelBundle::WithTokenizer::kNo);
  if (!bundle.ok()) return Fail(bundle.status(), kExitFailed);
  int read_step = kStepwise;
  if (!flags.contract.empty()) {
    auto parsed = ParseContract(flags.contract);
    if (!parsed.ok()) return Fail(parsed.status(), kExitUsage);
    read_step = *parsed;
  }
  auto schema = bundle->Schema(flags.dtype, {}, read_step);
  if (!schema.ok()) return Fail(schema.status(), kExitUsage);
  ThreadPool pool(ThreadsOrDefault(flags.threads));
  auto result = EvalLogits(*bundle->model, *schema, request, pool);
  if (!result.ok()) return Fail(result.status(), result.status().code() == Code::kNonFinite ? kExitFailed : kExitUsage);
  WarnOfSpike(flags.dtype, result->key_spike);
  nlohmann::json positions = nlohmann::json::array();
  for (const PositionLogits& p : result->positions)
    positions.push_back({{"position", p.position}, {"logits", p.logits}});
  if (flags.json) {
    ContextInfo info{.task = "eval logits",
                     .model = flags.model,
                     .model_digest = bundle->identity.model,
                     .data_hash = Sha256Hex(std::as_bytes(std::span(*ids))),
                     .context_length = static_cast<int64_t>(ids->size()) + flags.generate,
                     .schemas = {{flags.dtype, *schema}},
                     .contract = ContractName(schema->read_step),
                     .threads = pool.threads(),
                     .allow_fallback = flags.allow_fallback};
    fmt::print("{}\n", nlohmann::json{{"positions", positions},
                                      {"generated", result->generated},
                                      {"key_spike", SpikeJson(result->key_spike)},
                                      {"context", ContextJson(info)}}
                           .dump());
    return kExitOk;
  }
  for (const PositionLogits& p : result->positions) {
    std::vector<int32_t> order(p.logits.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    const size_t top = std::min<size_t>(10, order.size());
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(top), order.end(),
                      [&](int32_t a, int32_t b) {
                        const float x = p.logits[static_cast<size_t>(a)], y = p.logits[static_cast<size_t>(b)];
                        return x != y ? x > y : a < b;
                      });
    fmt::print("position {}:", p.position);
    for (size_t i = 0; i < top; ++i) fmt::print(" {}:{:.6f}", order[i], p.logits[static_cast<size_t>(order[i])]);
    fmt::print("\n");
  }
  if (flags.generate > 0) fmt::print("generated: {}\n", fmt::join(result->generated, ","));
  return kExitOk;
}

}  // namespace

void AddEval(CLI::App& app, int* exit_code) {
  CLI::App* cmd = app.add_subcommand("eval", "what a cache format does to the answer");
  cmd->require_subcommand(1);

  auto p = std::make_shared<PerplexityFlags>();
  p->model = DefaultModelDir();
  CLI::App* perplexity = cmd->add_subcommand("perplexity", "perplexity, and KL divergence against the f32 cache");
  perplexity->add_option("-m,--model", p->model, "model directory or GGUF file")->capture_default_str();
  perplexity->add_option("-f,--file", p->file, "text (default: the model's eval/heldout_books.txt)");
  perplexity->add_option("-c,--ctx-size", p->context, "rows of a window")
      ->check(CLI::Range(int64_t{2}, int64_t{1} << 31))
      ->capture_default_str();
  perplexity->add_option("--kv-cache-dtype", p->dtypes, "presets or policy files, separated by commas")
      ->capture_default_str();
  perplexity->add_option("--kv-cache-dtype-skip-layers", p->skip, "layers kept in f16, as 0,1,30-31");
  perplexity->add_option("--protocol", p->protocol, "windows | llama.cpp")->capture_default_str();
  perplexity->add_option("--contract", p->contract,
                         "stepwise | chunk:N | prompt (default: the policy's, else stepwise)");
  perplexity->add_option("--max-tokens", p->max_tokens, "use the first so many tokens of the text")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  perplexity->add_option("--prefill-chunk", p->prefill_chunk, "rows of a prefill step")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  perplexity->add_option("-t,--threads", p->threads, "windows in parallel; 0 = every core")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  perplexity->add_flag("--allow-fallback", p->allow_fallback,
                       "read what no kernel reads by the slow reference path, and count it");
  perplexity->add_flag("--json", p->json, "print JSON");
  perplexity->callback([p, exit_code] { *exit_code = RunPerplexity(*p); });

  auto l = std::make_shared<LogitsFlags>();
  l->model = DefaultModelDir();
  CLI::App* logits = cmd->add_subcommand("logits", "raw logits of given token ids; needs no tokenizer");
  logits->add_option("-m,--model", l->model, "model directory or GGUF file")->capture_default_str();
  logits->add_option("--token-ids", l->ids, "1,2,3 or a file of ids; fed as they are")->required();
  logits->add_option("--positions", l->positions, "rows whose logits are printed (default: the last)");
  logits->add_option("--generate", l->generate, "greedy tokens after the last row")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 31));
  logits->add_option("--kv-cache-dtype", l->dtype, "preset or JSON policy file")->capture_default_str();
  logits->add_option("--contract", l->contract, "stepwise | chunk:N | prompt");
  logits->add_option("--prefill-chunk", l->prefill_chunk, "rows of a prefill step")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  logits->add_option("-t,--threads", l->threads, "0 = every core")->check(CLI::Range(0, 1024))->capture_default_str();
  logits->add_flag("--allow-fallback", l->allow_fallback, "read what no kernel reads by the slow reference path");
  logits->add_flag("--json", l->json, "print JSON");
  logits->callback([l, exit_code] { *exit_code = RunLogits(*l); });
}

}  // namespace livequant::app
