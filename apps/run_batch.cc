// apps/run_batch.cc: livequant run --prompts: every line of a file is a request; answers come in the order of lines.
//
// All lines are read and checked before any runs: the first bad one ends the command, with its number, and nothing ran.
#include <fmt/format.h>

#include <cmath>
#include <string>
#include <vector>

#include "apps/console.h"
#include "apps/run.h"
#include "io/file.h"
#include "io/json.h"
#include "runtime/batch.h"

namespace livequant::app {
namespace {

using nlohmann::json;

constexpr int64_t kMaxBytes = int64_t{1} << 30;  // of the file

struct Line {
  json id;  // null: none was given
  BatchRequest request;
};

Result<int64_t> Integer(const std::string& name, const json& value, int64_t least) {
  if (!value.is_number_integer())
    return Status(Code::kInvalidArgument, fmt::format("{} is {}; must be an integer", name, ExcerptOfValue(value)));
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))
    return Status(Code::kOutOfRange, fmt::format("{} is {}; at most {}", name, ExcerptOfValue(value), INT64_MAX));
  if (value.get<int64_t>() < least)
    return Status(Code::kOutOfRange, fmt::format("{} is {}; at least {}", name, ExcerptOfValue(value), least));
  return value.get<int64_t>();
}

Result<double> Number(const std::string& name, const json& value) {
  if (!value.is_number())
    return Status(Code::kInvalidArgument, fmt::format("{} is {}; must be a number", name, ExcerptOfValue(value)));
  return value.get<double>();
}

// One line; fields that it leaves out are the command line's.
Result<Line> ParseLine(std::string_view text, const RunFlags& flags, const RunSetup& setup) {
  LQ_ASSIGN_OR_RETURN(const json object, ParseJson(text, "request"));
  if (!object.is_object()) return Status(Code::kInvalidArgument, "a request must be an object");
  Line line{
      .id = nullptr,
      .request = {.prompt = {}, .max_new_tokens = flags.n, .sampling = flags.sampling, .ignore_eos = flags.ignore_eos}};
  SamplingParams& sampling = line.request.sampling;
  for (const auto& [key, value] : object.items()) {
    if (key == "prompt") {
      if (!value.is_string())
        return Status(Code::kInvalidArgument, fmt::format("prompt is {}; must be a string", ExcerptOfValue(value)));
      auto ids = setup.bundle.tokenizer->Encode(value.get_ref<const std::string&>(), true);
      if (!ids.ok()) return Status(ids.status().code(), "prompt: " + ids.status().message());
      if (value.get_ref<const std::string&>().empty()) return Status(Code::kInvalidArgument, "prompt is empty");
      line.request.prompt = *std::move(ids);
    } else if (key == "id") {
      if (!value.is_string() && !value.is_number_integer())
        return Status(Code::kInvalidArgument,
                      fmt::format("id is {}; must be a string or an integer", ExcerptOfValue(value)));
      line.id = value;
    } else if (key == "n") {
      LQ_ASSIGN_OR_RETURN(line.request.max_new_tokens, Integer(key, value, 0));
    } else if (key == "temp") {
      LQ_ASSIGN_OR_RETURN(sampling.temperature, Number(key, value));
    } else if (key == "top_k") {
      LQ_ASSIGN_OR_RETURN(sampling.top_k, Integer(key, value, 0));
    } else if (key == "top_p") {
      LQ_ASSIGN_OR_RETURN(sampling.top_p, Number(key, value));
    } else if (key == "seed") {
      if (!value.is_number_unsigned())
        return Status(Code::kInvalidArgument,
                      fmt::format("seed is {}; must be an integer from 0 to 2^64 - 1", ExcerptOfValue(value)));
      sampling.seed = value.get<uint64_t>();
    } else {
      return Status(
          Code::kUnsupported,
          fmt::format("field '{}' is unknown; known are prompt, id, n, temp, top_k, top_p, seed", ExcerptOfKey(key)));
    }
  }
  if (line.request.prompt.empty()) return Status(Code::kInvalidArgument, "no prompt");
  LQ_RETURN_IF_ERROR(CheckRequest(line.request.prompt, line.request.max_new_tokens, sampling,
                                  setup.bundle.model->config().vocab_size, setup.context));
  return line;
}

Result<std::vector<Line>> ParseLines(std::string_view text, const RunFlags& flags, const RunSetup& setup) {
  std::vector<Line> lines;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    Result<Line> line = ParseLine(text.substr(0, end), flags, setup);
    if (!line.ok())
      return Status(line.status().code(),
                    fmt::format("{} line {}: {}", flags.prompts, lines.size() + 1, line.status().message()));
    lines.push_back(*std::move(line));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  if (lines.empty()) return Status(Code::kInvalidArgument, fmt::format("{}: no request", flags.prompts));
  return lines;
}

Result<json> ResultJson(const Line& line, const BatchResult& result, const Tokenizer& tokenizer) {
  const Generation& g = result.generation;
  LQ_ASSIGN_OR_RETURN(const std::string text, tokenizer.Decode(g.token_ids));
  return json{{"id", line.id},
              {"text", text},
              {"token_ids", g.token_ids},
              {"finish_reason", result.status.ok() ? FinishReasonName(g.finish) : "error"},
              {"error", result.status.ok() ? json() : json(result.status.message())},
              {"prompt_tokens", g.prompt_tokens}};
}

std::string OneLine(const json& value, int indent = -1) {
  return value.dump(indent, ' ', false, json::error_handler_t::replace) + "\n";
}

}  // namespace

int RunBatchFile(const RunFlags& flags, const RunSetup& setup) {
  const auto text = ReadFile(flags.prompts, kMaxBytes);
  if (!text.ok()) return Fail(text.status(), kExitUsage);
  const auto lines = ParseLines(*text, flags, setup);
  if (!lines.ok()) return Fail(lines.status(), kExitUsage);
  std::vector<BatchRequest> requests;
  int64_t new_tokens = 0, prompt_tokens = 0;
  for (const Line& line : *lines) {
    requests.push_back(line.request);
    prompt_tokens += static_cast<int64_t>(line.request.prompt.size());
  }

  ThreadPool pool(ThreadsOrDefault(flags.threads));
  BatchOptions options{.max_num_seqs = flags.max_num_seqs,
                       .context = setup.context,
                       .prefill_chunk = flags.prefill_chunk,
                       .memory_bytes = setup.memory_bytes,
                       .allow_fallback = flags.allow_fallback,
                       .cancel = &Interrupted()};
  // A line is written as soon as all before it were.
  std::vector<json> done(lines->size());
  size_t written = 0, ended = 0;
  Status broken;
  bool failed = false, cancelled = false;
  Progress progress("requests");
  options.on_finish = [&](size_t i, const BatchResult& result) {
    auto out = ResultJson((*lines)[i], result, *setup.bundle.tokenizer);
    if (!out.ok()) {
      if (broken.ok()) broken = out.status();
      return;
    }
    new_tokens += static_cast<int64_t>(result.generation.token_ids.size());
    failed |= !result.status.ok();
    cancelled |= result.generation.finish == FinishReason::kCancelled;
    done[i] = *std::move(out);
    progress.Update(static_cast<int64_t>(++ended), static_cast<int64_t>(done.size()));
    if (flags.json) return;
    for (; written < done.size() && !done[written].is_null() && broken.ok(); ++written)
      broken = WriteOut(OneLine(done[written]));
  };
  const auto run = RunBatch(setup.bundle.model, setup.schema, requests, options, pool);
  if (!run.ok()) return Fail(run.status(), kExitFailed);
  if (!broken.ok()) return Fail(broken, kExitFailed);

  if (flags.json) {
    ContextInfo info = setup.Info(flags, pool.threads());
    info.data_hash = Sha256Hex(std::as_bytes(std::span(*text)));
    info.context_length = setup.context;
    info.fallback_calls = run->fallback_calls;
    const Status s = WriteOut(OneLine({{"results", done},
                                       {"max_num_seqs", flags.max_num_seqs},
                                       {"most_at_once", run->most_at_once},
                                       {"steps", run->steps},
                                       {"mixed_steps", run->mixed_steps},
                                       {"rows", run->rows},
                                       {"seconds", run->seconds},
                                       {"prompt_tokens", prompt_tokens},
                                       {"new_tokens", new_tokens},
                                       {"pool_rows", run->pool_rows},
                                       {"pool_bytes", run->pool_bytes},
                                       {"peak_rss_bytes", PeakRssBytes()},
                                       {"key_spike", SpikeJson(run->key_spike)},
                                       {"context", ContextJson(info)}},
                                      2));
    if (!s.ok()) return Fail(s, kExitFailed);
  } else {
    fmt::print(stderr,
               "requests {}, {} at once; {} prompt and {} new tokens in {} steps ({} mixed), {:.3f} s, {:.0f} rows/s\n"
               "cache    {} under {}: a pool of {} for {} rows\n",
               done.size(), run->most_at_once, prompt_tokens, new_tokens, run->steps, run->mixed_steps, run->seconds,
               run->seconds > 0 ? static_cast<double>(run->rows) / run->seconds : 0, flags.dtype,
               ContractName(setup.schema.read_step), HumanBytes(static_cast<double>(run->pool_bytes)), run->pool_rows);
    if (run->fallback_calls > 0)
      fmt::print(stderr, "fallback {} attention calls took the reference path (--allow-fallback)\n",
                 run->fallback_calls);
  }
  WarnOfSpike(flags.dtype, run->key_spike);
  return cancelled ? kExitInterrupted : failed ? kExitFailed : kExitOk;
}

}  // namespace livequant::app
