// apps/run_chat.cc: livequant run -i: a conversation over one kept sequence. Each line of standard input is a turn.
//
// With the model's chat template the whole conversation is rendered anew each turn and the session reuses what still
// agrees with its rows; without one a turn is text that goes on behind the answer, and an empty line goes on without
// text. Ctrl-C ends an answer (a second one before the next line ends the program), the end of input the conversation.
// A turn that is refused leaves no trace in the history; the exit code then says that one was.
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <ctime>
#include <string>
#include <vector>

#include "apps/console.h"
#include "apps/run.h"
#include "io/file.h"
#include "io/gguf.h"
#include "model/model_files.h"
#include "runtime/session.h"
#include "text/chat_template.h"

namespace livequant::app {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr size_t kMaxLine = size_t{64} << 20;  // bytes of a turn: beyond any context

// The next line without its newline; nullopt at the end of input. A signal in the middle of a read changes nothing.
Result<std::optional<std::string>> ReadLine() {
  std::string line;
  for (int c;;) {
    errno = 0;
    c = std::getc(stdin);
    if (c == EOF) {
      if (std::ferror(stdin) != 0 && errno == EINTR) {
        std::clearerr(stdin);
        fmt::print(stderr, "\n(Ctrl-C again or the end of input leaves)\n");
        continue;
      }
      if (std::ferror(stdin) != 0) return Status(Code::kIo, "standard input cannot be read");
      return line.empty() ? std::nullopt : std::optional(std::move(line));
    }
    if (c == '\n') return std::optional(std::move(line));
    line += static_cast<char>(c);
    if (line.size() > kMaxLine)
      return Status(Code::kOutOfRange, fmt::format("a turn on standard input has more than {} bytes", kMaxLine));
  }
}

// The template of a directory or of a GGUF file, with the file's special tokens in `variables`; kNotFound: none.
Result<ChatTemplate> LoadTemplate(const std::string& path, ordered_json& variables) {
  if (!IsModelFile(path)) return ChatTemplate::Load(path);
  LQ_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  LQ_ASSIGN_OR_RETURN(const Gguf gguf, Gguf::Parse(file.bytes(), path));
  const GgufValue* source = gguf.Find("tokenizer.chat_template");
  if (source == nullptr) return Status(Code::kNotFound, fmt::format("{}: no tokenizer.chat_template", path));
  if (source->type != GgufType::kString)
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: tokenizer.chat_template is {}; must be a string", path, GgufTypeName(source->type)));
  const GgufValue* tokens = gguf.Find("tokenizer.ggml.tokens");
  for (const char* name : {"bos", "eos", "unk", "pad"}) {
    const GgufValue* id = gguf.Find(fmt::format("tokenizer.ggml.{}_token_id", name));
    if (id == nullptr || tokens == nullptr) continue;
    const auto* number = std::get_if<uint64_t>(&id->value);
    const auto* list = std::get_if<GgufArray>(&tokens->value);
    if (number != nullptr && list != nullptr && *number < list->strings.size())
      variables[fmt::format("{}_token", name)] = std::string(list->strings[*number]);
  }
  return ChatTemplate::Parse(std::get<std::string_view>(source->value));
}

class Chat {
 public:
  Chat(const RunFlags& flags, const RunSetup& setup, Session& session, const Speculation& speculation)
      : flags_(flags),
        tokenizer_(*setup.bundle.tokenizer),
        session_(session),
        speculation_(speculation),
        now_(std::time(nullptr)) {}

  // Reads the template, if there is one. kUnsupported: --system without a template.
  Status Open(const RunSetup& setup) {
    auto found = LoadTemplate(setup.bundle.path, variables_);
    if (found.ok()) {
      template_ = *std::move(found);
    } else if (found.status().code() != Code::kNotFound) {
      return found.status();
    } else if (flags_.system_given) {
      return Status(Code::kUnsupported,
                    fmt::format("--system needs a chat template, and {} has none: put the text into the first turn",
                                setup.bundle.path));
    }
    if (flags_.system_given) messages_.push_back({{"role", "system"}, {"content", flags_.system}});
    return {};
  }
  bool has_template() const { return template_.has_value(); }

  // One turn: the answer goes to standard output as it comes (not under --json) and into the history. On an error the
  // history is as it was.
  Status Turn(const std::string& line) {
    LQ_ASSIGN_OR_RETURN(const std::vector<int32_t> prompt, Prompt(line));
    StreamingDetokenizer stream(tokenizer_);
    std::string text;
    Status broken;
    const auto emit = [&](const std::string& piece) {
      text += piece;
      if (!flags_.json && !piece.empty() && broken.ok()) broken = WriteOut(piece);
    };
    GenerateParams params{.max_new_tokens = flags_.n,
                          .sampling = flags_.sampling,
                          .ignore_eos = flags_.ignore_eos,
                          .drafter = speculation_.drafter.get(),
                          .cancel = &Interrupted()};
    params.on_token = [&](int32_t id) {
      auto piece = stream.Push(id);
      if (piece.ok())
        emit(*piece);
      else if (broken.ok())
        broken = piece.status();
    };
    auto generation = session_.Continue(prompt, params);
    Interrupted() = false;  // it ended the answer, and the next one may end the program
    if (!generation.ok()) return generation.status();
    const Generation& g = *generation;
    emit(stream.Finish());
    fallback_calls_ += g.fallback_calls;
    if (g.key_spike.has_value() && !warned_) {
      warned_ = true;
      WarnOfSpike(flags_.dtype, g.key_spike);
    }
    if (template_.has_value()) {
      messages_.push_back({{"role", "user"}, {"content", line}});
      messages_.push_back({{"role", "assistant"}, {"content", text}});
    } else {
      history_ = prompt;
      history_.insert(history_.end(), g.token_ids.begin(), g.token_ids.end());
    }
    if (flags_.json)
      turns_.push_back({{"text", text},
                        {"token_ids", g.token_ids},
                        {"finish_reason", FinishReasonName(g.finish)},
                        {"prompt_token_ids", prompt},
                        {"reused_rows", g.reused_rows},
                        {"prefilled_rows", g.prompt_tokens - g.reused_rows},
                        {"prefill_seconds", g.prefill_seconds},
                        {"decode_seconds", g.decode_seconds},
                        {"speculation", speculation_.Json(flags_, g)},
                        {"cache_rows", g.cache_rows},
                        {"pending_tokens", g.pending_tokens},
                        {"cache_bytes", g.cache_used_bytes},
                        {"key_spike", SpikeJson(g.key_spike)}});
    else if (broken.ok())
      broken = WriteOut("\n");
    if (!flags_.json)
      fmt::print(stderr, "[turn {}: {} rows reused, {} prefilled in {:.3f} s; {} new tokens, {:.0f} tokens/s; {}]\n",
                 ++count_, g.reused_rows, g.prompt_tokens - g.reused_rows, g.prefill_seconds, g.token_ids.size(),
                 g.decode_tokens_per_s(), FinishReasonName(g.finish));
    if (!flags_.json) speculation_.Print(flags_, g);
    output_ = broken;
    return {};
  }
  const Status& output() const { return output_; }  // whether the last answer could be written
  const json& turns() const { return turns_; }
  int64_t fallback_calls() const { return fallback_calls_; }

 private:
  // All tokens of the conversation up to where the answer to `line` begins.
  Result<std::vector<int32_t>> Prompt(const std::string& line) const {
    if (template_.has_value()) {
      ordered_json variables = variables_;
      variables["messages"] = messages_;
      variables["messages"].push_back({{"role", "user"}, {"content", line}});
      variables["add_generation_prompt"] = true;
      LQ_ASSIGN_OR_RETURN(const std::string text, template_->Render(variables, now_));
      return tokenizer_.Encode(text, false);  // a template writes the special tokens itself
    }
    LQ_ASSIGN_OR_RETURN(const std::vector<int32_t> more, tokenizer_.Encode(line, history_.empty()));
    std::vector<int32_t> prompt = history_;
    prompt.insert(prompt.end(), more.begin(), more.end());
    return prompt;
  }

  const RunFlags& flags_;
  const Tokenizer& tokenizer_;
  Session& session_;
  const Speculation& speculation_;
  const int64_t now_;  // of the whole conversation: a template that shows the date renders the past alike
  std::optional<ChatTemplate> template_;
  ordered_json variables_ = ordered_json::object(), messages_ = ordered_json::array();
  std::vector<int32_t> history_;  // without a template: all tokens so far
  json turns_ = json::array();
  Status output_;
  int64_t fallback_calls_ = 0;
  int count_ = 0;
  bool warned_ = false;  // of a key spike: once
};

}  // namespace

int RunChat(const RunFlags& flags, const RunSetup& setup) {
  if (setup.schema.read_step != kStepwise)
    return Fail(
        Status(Code::kUnsupported,
               fmt::format("-i keeps rows between turns, which the contract stepwise alone reads as a fresh run "
                           "would; the contract is {}",
                           ContractName(setup.schema.read_step))),
        kExitUsage);
  ThreadPool pool(ThreadsOrDefault(flags.threads));
  auto session = Session::Open(setup.bundle.model, setup.schema,
                               {.max_len = setup.context,
                                .prefill_chunk = flags.prefill_chunk,
                                .memory_bytes = setup.memory_bytes,
                                .allow_fallback = flags.allow_fallback,
                                .max_draft_tokens = flags.DraftTokens()},
                               pool);
  if (!session.ok()) return Fail(session.status(), kExitFailed);
  const auto speculation = OpenSpeculation(flags, setup, setup.context, pool);
  if (!speculation.ok()) return Fail(speculation.status(), kExitUsage);
  Chat chat(flags, setup, **session, *speculation);
  if (const Status s = chat.Open(setup); !s.ok()) return Fail(s, kExitUsage);
  fmt::print(
      stderr, "{}; a context of {} rows in a pool of {}\n",
      chat.has_template() ? "the model's chat template" : "no chat template: each line goes on behind the answer",
      setup.context, HumanBytes(static_cast<double>((*session)->pool_bytes())));

  const bool terminal = isatty(STDIN_FILENO) != 0;
  std::string input;
  bool refused = false;
  for (bool first = true;;) {
    if (terminal) fmt::print(stderr, "> ");
    auto line = ReadLine();
    if (!line.ok()) return Fail(line.status(), kExitFailed);
    if (!line->has_value()) break;
    Interrupted() = false;
    if ((*line)->empty() && (chat.has_template() || first)) continue;  // nothing was said
    const Status turn = chat.Turn(**line);
    if (!chat.output().ok()) return Fail(chat.output(), kExitFailed);
    if (!turn.ok()) {
      refused = true;
      fmt::print(stderr, "error: {}\n", turn.message());
      continue;
    }
    first = false;
    input += **line + "\n";
  }
  if (flags.json) {
    ContextInfo info = setup.Info(flags, pool.threads());
    info.data_hash = Sha256Hex(std::as_bytes(std::span(input)));
    info.context_length = setup.context;
    info.fallback_calls = chat.fallback_calls();
    const json out = {{"turns", chat.turns()},
                      {"chat_template", chat.has_template()},
                      {"pool_bytes", (*session)->pool_bytes()},
                      {"peak_rss_bytes", PeakRssBytes()},
                      {"context", ContextJson(info)}};
    if (const Status s = WriteOut(out.dump(2, ' ', false, json::error_handler_t::replace) + "\n"); !s.ok())
      return Fail(s, kExitFailed);
  }
  return refused ? kExitFailed : kExitOk;
}

}  // namespace livequant::app
