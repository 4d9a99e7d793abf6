// apps/ledger.cc: livequant ledger: what a cache costs, from schema and shapes alone. Runs no model.
#include <fmt/format.h>

#include <memory>

#include "apps/console.h"
#include "apps/context.h"
#include "cache/ledger/ledger.h"
#include "method/method.h"
#include "model/model_files.h"

namespace livequant::app {
namespace {

struct LedgerFlags {
  std::string model, dtypes, skip, memory, contract = "stepwise";
  int layers = 0, kv_heads = 0, head_dim = 0, prefill_chunk = 512;
  int64_t tokens = 4096, generate = 0, requests = 1;
  bool json = false;
};

Result<CacheShape> ShapeOf(const LedgerFlags& flags) {
  if (flags.layers > 0 || flags.kv_heads > 0 || flags.head_dim > 0) {
    if (!flags.model.empty()) return Status(Code::kInvalidArgument, "-m and shape flags exclude each other");
    if (flags.layers == 0 || flags.kv_heads == 0 || flags.head_dim == 0)
      return Status(Code::kInvalidArgument,
                    fmt::format("a shape needs --layers ({}), --kv-heads ({}) and --head-dim ({})", flags.layers,
                                flags.kv_heads, flags.head_dim));
    return CacheShape{
        .num_layers = flags.layers, .num_kv_heads = flags.kv_heads, .head_dim = flags.head_dim, .rope = {}};
  }
  const std::string dir = flags.model.empty() ? DefaultModelDir() : flags.model;
  LQ_ASSIGN_OR_RETURN(const LlamaConfig config, ReadModelConfig(dir));
  return config.shape();
}

nlohmann::json ResultJson(const LedgerFlags& flags, const CacheSchema& schema, int64_t memory_bytes) {
  const std::vector<LedgerSegment> segments = SegmentsOf(schema);
  const LedgerBytes b = Ledger(segments, flags.tokens);
  nlohmann::json out = {
      {"total_bytes", b.total()},
      {"bytes_per_token", flags.tokens > 0 ? static_cast<double>(b.total()) / static_cast<double>(flags.tokens) : 0.0},
      {"terms",
       {{"codes", b.codes},
        {"qparams", b.qparams},
        {"residual", b.residual},
        {"sparse", b.sparse},
        {"exact_prefix", b.exact_prefix},
        {"pages", b.pages}}},
      {"decode_read_bytes", DecodeReadBytes(segments, flags.tokens)},
      {"slack_bytes", b.slack},
      {"table_bytes", b.tables},
      {"workspace_bytes", b.workspace},
      {"artifact_bytes", b.artifact},
      {"shared_bytes", b.shared}};
  if (flags.generate > 0)
    out["cumulative_read_bytes"] = {
        {"prompt_tokens", flags.tokens},
        {"generated_tokens", flags.generate},
        {"before_append", CumulativeReadBytes(segments, flags.tokens, flags.generate, false)},
        {"new_row_included", CumulativeReadBytes(segments, flags.tokens, flags.generate, true)}};
  if (memory_bytes > 0)
    out["memory"] = {{"bytes", memory_bytes},
                     {"tokens_of_one_request", TokensThatFit(schema, memory_bytes, flags.prefill_chunk)},
                     {"requests", SequencesThatFit(schema, memory_bytes, flags.tokens, flags.prefill_chunk)},
                     {"tokens_per_request", flags.tokens}};
  return out;
}

Status Run(const LedgerFlags& flags, ContextInfo info) {
  LQ_ASSIGN_OR_RETURN(const CacheShape shape, ShapeOf(flags));
  int64_t memory_bytes = 0;
  if (!flags.memory.empty()) {
    LQ_ASSIGN_OR_RETURN(memory_bytes, ParseBytes(flags.memory));
  }
  std::vector<int> skip;
  if (!flags.skip.empty()) {
    LQ_ASSIGN_OR_RETURN(skip, ParseIntList(flags.skip, "--kv-cache-dtype-skip-layers"));
  }
  LQ_ASSIGN_OR_RETURN(const int read_step, ParseContract(flags.contract));
  info.context_length = flags.tokens;
  info.contract = flags.contract;
  const std::vector<std::string> names = flags.dtypes.empty() ? PresetNames() : Split(flags.dtypes, ',');
  std::vector<std::pair<std::string, nlohmann::json>> results;
  nlohmann::json refused = nlohmann::json::object();
  for (const std::string& name : names) {
    auto made = SchemaFor(name, shape, skip);
    if (!made.ok() && flags.dtypes.empty() && made.status().code() == Code::kUnsupported) {
      // Nobody asked for this one in particular: the others have their answer, and this one its reason.
      refused[name] = made.status().message();
      continue;
    }
    if (!made.ok()) return made.status();
    CacheSchema schema = *std::move(made);
    if (read_step != kStepwise) schema.read_step = read_step;
    results.emplace_back(name, ResultJson(flags, schema, memory_bytes));
    info.schemas[name] = schema;
  }
  if (flags.json) {
    nlohmann::json out;
    if (results.size() == 1) {
      out = results[0].second;
    } else {
      for (const auto& [name, r] : results) {
        out["results"].push_back(r);
        out["results"].back()["format"] = name;
      }
    }
    if (!refused.empty()) out["refused"] = refused;
    out["context"] = ContextJson(info);
    fmt::print("{}\n", out.dump(2));
    return {};
  }
  fmt::print("{} layers, {} KV heads, head size {}, {} tokens\n\n", shape.num_layers, shape.num_kv_heads,
             shape.head_dim, flags.tokens);
  std::vector<std::vector<std::string>> rows = {{"format", "total", "per token", "codes", "qparams", "residual",
                                                 "sparse", "exact prefix", "pages", "slack", "decode read"}};
  if (flags.generate > 0) rows[0].push_back(fmt::format("read in {} steps", flags.generate));
  if (memory_bytes > 0) rows[0].insert(rows[0].end(), {"tokens that fit", fmt::format("requests of {}", flags.tokens)});
  const auto human = [](const nlohmann::json& v) { return HumanBytes(v.get<double>()); };
  for (const auto& [name, r] : results) {
    const nlohmann::json& t = r["terms"];
    rows.push_back({name, human(r["total_bytes"]), HumanBytes(r["bytes_per_token"].get<double>()), human(t["codes"]),
                    human(t["qparams"]), human(t["residual"]), human(t["sparse"]), human(t["exact_prefix"]),
                    human(t["pages"]), human(r["slack_bytes"]), human(r["decode_read_bytes"])});
    if (flags.generate > 0) rows.back().push_back(human(r["cumulative_read_bytes"]["new_row_included"]));
    if (memory_bytes > 0)
      rows.back().insert(rows.back().end(), {fmt::format("{}", r["memory"]["tokens_of_one_request"].get<int64_t>()),
                                             fmt::format("{}", r["memory"]["requests"].get<int64_t>())});
  }
  fmt::print("{}", Table(rows));
  for (const auto& [name, why] : refused.items()) fmt::print("\n{}\n", why.get<std::string>());
  return {};
}

}  // namespace

void AddLedger(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<LedgerFlags>();
  CLI::App* cmd =
      app.add_subcommand("ledger", "exact bytes of a cache: codes, qparams, exact rows, pages; no model is run");
  cmd->add_option("-m,--model", flags->model, "model directory or GGUF file (default: the embedded model)");
  cmd->add_option("--layers", flags->layers, "number of layers, instead of a model")->check(CLI::Range(1, 100000));
  cmd->add_option("--kv-heads,--num-key-value-heads", flags->kv_heads, "KV heads")->check(CLI::Range(1, 1 << 20));
  cmd->add_option("--head-dim", flags->head_dim, "values of one head of one row")->check(CLI::Range(1, 65536));
  cmd->add_option("--tokens", flags->tokens, "rows of the sequence")->check(CLI::Range(int64_t{0}, int64_t{1} << 31));
  cmd->add_option("--kv-cache-dtype", flags->dtypes,
                  "presets or policy files, separated by commas (default: every preset)");
  cmd->add_option("--kv-cache-dtype-skip-layers", flags->skip, "layers kept in f16, as 0,1,30-31");
  cmd->add_option("--contract", flags->contract, "stepwise | chunk:N | prompt");
  cmd->add_option("--generate", flags->generate, "also: bytes read by this many decode steps")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 31));
  cmd->add_option("--memory", flags->memory, "also: how many tokens and requests fit in so many bytes (64MiB, 8GiB)");
  cmd->add_option("--prefill-chunk", flags->prefill_chunk, "rows of the largest step, for --memory")
      ->check(CLI::Range(1, 1 << 20));
  cmd->add_flag("--json", flags->json, "print JSON");
  cmd->callback([flags, exit_code] {
    ContextInfo info{.task = "ledger"};
    const Status status = Run(*flags, info);
    *exit_code = status.ok() ? kExitOk : Fail(status, kExitUsage);
  });
}

}  // namespace livequant::app
