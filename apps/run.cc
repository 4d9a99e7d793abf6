// apps/run.cc: livequant run: its flags, and one prompt continued through one cache format, with what it cost.
#include "apps/run.h"

#include <fmt/format.h>

#include <unistd.h>
#include <algorithm>

#include <cstdio>
#include <memory>
#include <optional>

#include "apps/console.h"
#include "apps/context.h"
#include "cache/ledger/ledger.h"
#include "io/file.h"
#include "runtime/model_bundle.h"
#include "runtime/session.h"

namespace livequant::app {
namespace {

// All of standard input, bounded: a prompt beyond any context is refused before it is tokenized.
Result<std::string> ReadStdin() {
  constexpr size_t kMost = size_t{64} << 20;
  std::string text;
  char buffer[1 << 16];
  for (size_t got; (got = std::fread(buffer, 1, sizeof buffer, stdin)) > 0;) {
    text.append(buffer, got);
    if (text.size() > kMost)
      return Status(Code::kOutOfRange, fmt::format("prompt on standard input: more than {} bytes", kMost));
  }
  return text;
}

// Everything that the three ways need before they look at a prompt. The exit code belongs to the error.
Result<RunSetup> Prepare(const RunFlags& flags, int* exit_code) {
  *exit_code = kExitUsage;
  RunSetup setup;
  LQ_RETURN_IF_ERROR(ValidateSampling(flags.sampling));
  if (!flags.memory.empty()) {
    LQ_ASSIGN_OR_RETURN(setup.memory_bytes, ParseBytes(flags.memory));
  }
  std::vector<int> skip;
  if (!flags.skip.empty()) {
    LQ_ASSIGN_OR_RETURN(skip, ParseIntList(flags.skip, "--kv-cache-dtype-skip-layers"));
  }
  auto bundle = ModelBundle::Load(flags.model);
  if (!bundle.ok()) {
    *exit_code = kExitFailed;
    return bundle.status();
  }
  setup.bundle = *std::move(bundle);
  LQ_ASSIGN_OR_RETURN(setup.schema, setup.bundle.Schema(flags.dtype, skip));
  if (!flags.contract.empty()) {
    LQ_ASSIGN_OR_RETURN(setup.schema.read_step, ParseContract(flags.contract));
    LQ_RETURN_IF_ERROR(Validate(setup.schema));
  }
  LQ_RETURN_IF_ERROR(KernelsJson(setup.schema, flags.allow_fallback).status());
  setup.context = flags.max_model_len > 0 ? flags.max_model_len : setup.bundle.model->config().max_position_embeddings;
  return setup;
}

int RunPrompt(const RunFlags& flags, const RunSetup& setup, const std::string& prompt) {
  const ModelBundle& bundle = setup.bundle;
  const CacheSchema& schema = setup.schema;
  auto ids = bundle.tokenizer->Encode(prompt, true);
  if (!ids.ok()) return Fail(Status(ids.status().code(), "prompt: " + ids.status().message()), kExitUsage);
  const auto prompt_tokens = static_cast<int64_t>(ids->size());
  if (prompt_tokens + flags.n > setup.context)
    return Fail(Status(Code::kOutOfRange,
                       fmt::format("the prompt has {} tokens and -n asks for {}: {} together, the context holds {}",
                                   prompt_tokens, flags.n, prompt_tokens + flags.n, setup.context)),
                kExitUsage);

  if (flags.beams > 0) return RunBeamSearch(flags, setup, prompt, *ids);
  if (!flags.record.empty())
    if (const Status s = CheckRecord(bundle.model->config(), prompt_tokens + flags.n); !s.ok())
      return Fail(s, kExitUsage);

  ThreadPool pool(ThreadsOrDefault(flags.threads));
  SessionOptions options{.max_len = flags.max_model_len > 0 ? flags.max_model_len : prompt_tokens + flags.n,
                         .prefill_chunk = flags.prefill_chunk,
                         .memory_bytes = setup.memory_bytes,
                         .allow_fallback = flags.allow_fallback,
                         .max_draft_tokens = flags.DraftTokens()};
  auto session = Session::Open(bundle.model, schema, options, pool);
  if (!session.ok()) return Fail(session.status(), kExitFailed);
  const auto speculation = OpenSpeculation(flags, setup, prompt_tokens + flags.n, pool);
  if (!speculation.ok()) return Fail(speculation.status(), kExitUsage);

  StreamingDetokenizer stream(*bundle.tokenizer);
  std::string text;
  Status broken;
  Status unwritten;
  const auto emit = [&](const std::string& piece) {
    text += piece;
    if (!flags.json && !piece.empty() && unwritten.ok()) unwritten = WriteOut(piece);
  };
  std::optional<Progress> progress(std::in_place, "prefill");
  GenerateParams params{
      .max_new_tokens = flags.n, .sampling = flags.sampling, .ignore_eos = flags.ignore_eos, .cancel = &Interrupted()};
  params.drafter = speculation->drafter.get();
  params.on_prefill = [&](int64_t done, int64_t total) {
    if (done < total)
      progress->Update(done, total);
    else
      progress.reset();
  };
  params.on_token = [&](int32_t id) {
    auto piece = stream.Push(id);
    if (piece.ok())
      emit(*piece);
    else if (broken.ok())
      broken = piece.status();
  };
  AttentionRecord record;  // its lease ends before the session does
  if (!flags.record.empty()) params.record = &record;
  auto generation = (*session)->Generate(*ids, params);
  progress.reset();
  if (!generation.ok()) return Fail(generation.status(), kExitFailed);
  emit(stream.Finish());
  if (!broken.ok()) return Fail(broken, kExitFailed);
  if (!unwritten.ok()) return Fail(unwritten, kExitFailed);
  if (!flags.record.empty() && record.steps.empty())
    fmt::print(stderr, "no step ran: {} is not written\n", flags.record);
  else if (!flags.record.empty())
    if (const Status s = WriteRecord(flags.record, bundle.model->config(), (*session)->cache(), record); !s.ok())
      return Fail(s, kExitFailed);

  const Generation& g = *generation;
  const LedgerBytes ledger = Ledger(schema, g.cache_rows);
  if (flags.json) {
    ContextInfo info = setup.Info(flags, pool.threads());
    info.data_hash = Sha256Hex(std::as_bytes(std::span(prompt)));
    info.context_length = (*session)->max_len();
    info.fallback_calls = g.fallback_calls;
    const nlohmann::json out = {{"text", text},
                                {"token_ids", g.token_ids},
                                {"finish_reason", FinishReasonName(g.finish)},
                                {"prompt_tokens", g.prompt_tokens},
                                {"prefill_seconds", g.prefill_seconds},
                                {"decode_seconds", g.decode_seconds},
                                {"prefill_tokens_per_s", g.prefill_tokens_per_s()},
                                {"decode_tokens_per_s", g.decode_tokens_per_s()},
                                {"decode_steps", g.decode_steps},
                                {"speculation", speculation->Json(flags, g)},
                                {"cache_rows", g.cache_rows},
                                {"pending_tokens", g.pending_tokens},
                                {"cache_bytes", g.cache_used_bytes},
                                {"ledger_bytes", ledger.total()},
                                {"slack_bytes", ledger.slack},
                                {"pool_bytes", (*session)->pool_bytes()},
                                {"peak_rss_bytes", PeakRssBytes()},
                                {"key_spike", SpikeJson(g.key_spike)},
                                {"context", ContextJson(info)}};
    if (const Status s = WriteOut(out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n"); !s.ok())
      return Fail(s, kExitFailed);
  } else {
    if (const Status s = WriteOut("\n"); !s.ok()) return Fail(s, kExitFailed);
    fmt::print(stderr,
               "\nprefill  {} tokens in {:.3f} s, {:.0f} tokens/s\ndecode   {} steps in {:.3f} s, {:.0f} tokens/s\n"
               "cache    {} under {}, {} rows: {} by ledger + {} slack = {} in pages of a pool of {}\nfinish   {}; "
               "peak RSS {}\n",
               g.prompt_tokens, g.prefill_seconds, g.prefill_tokens_per_s(), g.decode_steps, g.decode_seconds,
               g.decode_tokens_per_s(), flags.dtype, ContractName(schema.read_step), g.cache_rows,
               HumanBytes(static_cast<double>(ledger.total())), HumanBytes(static_cast<double>(ledger.slack)),
               HumanBytes(static_cast<double>(g.cache_used_bytes)),
               HumanBytes(static_cast<double>((*session)->pool_bytes())), FinishReasonName(g.finish),
               HumanBytes(static_cast<double>(PeakRssBytes())));
    speculation->Print(flags, g);
    if (g.fallback_calls > 0)
      fmt::print(stderr, "fallback {} attention calls took the reference path (--allow-fallback)\n", g.fallback_calls);
  }
  WarnOfSpike(flags.dtype, g.key_spike);
  return g.finish == FinishReason::kCancelled ? kExitInterrupted : kExitOk;
}

int Run(const RunFlags& flags) {
  std::string prompt = flags.prompt;
  const bool one = flags.prompts.empty() && !flags.interactive;
  if (one && !flags.prompt_given) {
    auto text = ReadStdin();
    if (!text.ok()) return Fail(text.status(), kExitUsage);
    prompt = *text;
  }
  if (one && prompt.empty())
    return Fail(Status(Code::kInvalidArgument, "empty prompt: give text with -p or on standard input"), kExitUsage);
  int exit_code = kExitOk;
  const auto setup = Prepare(flags, &exit_code);
  if (!setup.ok()) return Fail(setup.status(), exit_code);
  if (flags.print_config) {
    ContextInfo info{.task = "run",
                     .model = flags.model,
                     .model_digest = setup->bundle.identity.model,
                     .schemas = {{flags.dtype, setup->schema}}};
    fmt::print("{}\n", ContextJson(info).dump(2));
    return kExitOk;
  }
  if (!flags.prompts.empty()) return RunBatchFile(flags, *setup);
  if (flags.interactive) return RunChat(flags, *setup);
  return RunPrompt(flags, *setup, prompt);
}

}  // namespace

ContextInfo RunSetup::Info(const RunFlags& flags, int threads) const {
  return {.task = "run",
          .model = flags.model,
          .model_digest = bundle.identity.model,
          .schemas = {{flags.dtype, schema}},
          .contract = ContractName(schema.read_step),
          .threads = threads,
          .has_seed = true,
          .seed = flags.sampling.seed,
          .allow_fallback = flags.allow_fallback};
}

Status WriteOut(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) return {};
  return Status(Code::kIo, "standard output cannot be written");
}

void AddRun(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<RunFlags>();
  flags->model = DefaultModelDir();
  CLI::App* cmd = app.add_subcommand("run", "continue a prompt, a file of prompts or a conversation");
  cmd->add_option("-m,--model", flags->model, "model directory or GGUF file")->capture_default_str();
  CLI::Option* prompt = cmd->add_option("-p,--prompt", flags->prompt, "prompt (default: standard input)");
  CLI::Option* prompts = cmd->add_option("--prompts", flags->prompts,
                                         "JSON lines: {\"prompt\": ...} with id, n, temp, top_k, top_p, seed");
  prompts->excludes(prompt);
  cmd->add_option("--batch,--max-num-seqs", flags->max_num_seqs, "requests of --prompts that run at once, at most")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str()
      ->needs(prompts);
  CLI::Option* interactive = cmd->add_flag("-i,--interactive", flags->interactive,
                                           "a conversation: each line of standard input is a turn, EOF ends it");
  interactive->excludes(prompt)->excludes(prompts);
  CLI::Option* system = cmd->add_option("--system", flags->system, "system message of a conversation");
  system->needs(interactive);
  CLI::Option* beams =
      cmd->add_option("--beams,--num-beams", flags->beams, "beam search with so many beams, best first")
          ->check(CLI::Range(1, 256));
  beams->excludes(prompts)->excludes(interactive);
  cmd->add_option("--length-penalty", flags->length_penalty,
                  "hypotheses are scored by sum of log-probabilities / tokens^this")
      ->check(CLI::Range(-100.0, 100.0))
      ->capture_default_str()
      ->needs(beams);
  CLI::Option* speculate = cmd->add_option("--speculate", flags->speculate,
                                           "ngram (prompt lookup) or a draft model: the same tokens in fewer steps");
  speculate->excludes(prompts)->excludes(beams);
  cmd->add_option("--num-speculative-tokens,--draft-max", flags->speculative_tokens, "tokens of a draft at most")
      ->check(CLI::Range(int64_t{1}, int64_t{256}))
      ->capture_default_str()
      ->needs(speculate);
  cmd->add_option("--prompt-lookup-max", flags->prompt_lookup_max, "ngram: tokens to find again, at most")
      ->check(CLI::Range(1, 64))
      ->capture_default_str()
      ->needs(speculate);
  cmd->add_option("--prompt-lookup-min", flags->prompt_lookup_min, "ngram: tokens to find again, at least")
      ->check(CLI::Range(1, 64))
      ->capture_default_str()
      ->needs(speculate);
  cmd->add_option("--draft-kv-cache-dtype", flags->draft_dtype,
                  "cache of the draft model: preset or policy file (default: as --kv-cache-dtype)")
      ->needs(speculate);
  cmd->add_option("-n,--n-predict", flags->n, "new tokens at most")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 31))
      ->capture_default_str();
  cmd->add_option("--kv-cache-dtype", flags->dtype, "preset or JSON policy file")->capture_default_str();
  cmd->add_option("--kv-cache-dtype-skip-layers", flags->skip, "layers kept in f16, as 0,1,30-31");
  cmd->add_option("--kv-cache-memory", flags->memory,
                  "budget of the cache (64MiB): too small is an error, never a shorter context");
  cmd->add_option("--max-model-len,-c", flags->max_model_len, "rows that the cache is made for (default: prompt + n)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 31));
  cmd->add_option("--contract", flags->contract, "stepwise | chunk:N | prompt (default: the policy's, else stepwise)");
  cmd->add_option("--prefill-chunk", flags->prefill_chunk, "rows of a prefill step")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  cmd->add_option("--seed,-s", flags->sampling.seed, "of sampling")->capture_default_str();
  CLI::Option* temperature = cmd->add_option("--temp,--temperature", flags->sampling.temperature, "0 = greedy")
                                 ->check(CLI::Range(0.0, 100.0))
                                 ->capture_default_str();
  CLI::Option* top_k = cmd->add_option("--top-k", flags->sampling.top_k, "0 = all")
                           ->check(CLI::Range(int64_t{0}, int64_t{1} << 31))
                           ->capture_default_str();
  CLI::Option* top_p =
      cmd->add_option("--top-p", flags->sampling.top_p, "1 = all")->check(CLI::Range(0.0, 1.0))->capture_default_str();
  for (CLI::Option* sampling : {temperature, top_k, top_p}) beams->excludes(sampling);  // a beam search draws nothing
  cmd->add_option("-t,--threads", flags->threads, "0 = every core")->check(CLI::Range(0, 1024))->capture_default_str();
  CLI::Option* record = cmd->add_option(
      "--record", flags->record,
      "write what attention got and gave, and the cache's bytes, as safetensors (docs/formats/record.md)");
  record->excludes(prompts)->excludes(interactive)->excludes(beams)->excludes(speculate);
  cmd->add_flag("--ignore-eos", flags->ignore_eos, "go on after the end-of-text token");
  cmd->add_flag("--allow-fallback", flags->allow_fallback,
                "read what no kernel reads by the slow reference path, and count it");
  cmd->add_flag("--print-config", flags->print_config, "print what would run, as JSON, and stop");
  cmd->add_flag("--json", flags->json, "print one JSON object at the end instead of streaming");
  cmd->callback([flags, prompt, prompts, system, speculate, record, exit_code] {
    flags->prompt_given = prompt->count() > 0;
    flags->system_given = system->count() > 0;
    if (speculate->count() > 0 && flags->speculate.empty()) {
      *exit_code =
          Fail(Status(Code::kInvalidArgument, "--speculate is empty: ngram, or a draft model's path"), kExitUsage);
      return;
    }
    if (prompts->count() > 0 && flags->prompts.empty()) {
      *exit_code = Fail(Status(Code::kInvalidArgument, "--prompts: the name of a file is empty"), kExitUsage);
      return;
    }
    if (record->count() > 0 && flags->record.empty()) {
      *exit_code = Fail(Status(Code::kInvalidArgument, "--record: the name of a file is empty"), kExitUsage);
      return;
    }
    *exit_code = Run(*flags);
  });
}

}  // namespace livequant::app
