// text/chat_template.h: conversations to prompts by a model's own chat template, in the part of Jinja that templates
// use.
//
// Whatever a template does ends: steps, output, memory and nesting have limits. A template touches nothing but the
// values that it was given.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace livequant {

struct ChatTemplateLimits {
  int64_t max_steps = 2'000'000;          // nodes evaluated, values copied, 16 bytes of text read
  int64_t max_bytes = int64_t{16} << 20;  // of text made, of the output and on the way to it
  int64_t max_times = 16;                 // and the text of the variables may be made and read so many times more
  static constexpr int kMaxDepth = 64;    // of statements, expressions, macros and values inside each other
  static constexpr size_t kMaxSource = 1 << 20;  // bytes of a template
};

// A parsed template. Immutable; copies share it; any number of threads may use one.
class ChatTemplate {
 public:
  // The source of a template, read as transformers does: trim_blocks and lstrip_blocks set, break and continue known.
  // Statements: if, for (else, filter, unpacking, break, continue), set (also of blocks and namespaces), macro, call,
  // filter, with, raw, generation. kInvalidArgument: a syntax error (line). kUnsupported: a statement, filter, test or
  // method that nobody here knows (line and name). kOutOfRange: too large or too deep. Source: Jinja 3.1, transformers.
  static Result<ChatTemplate> Parse(std::string_view source);
  // The template of a model directory: chat_template.jinja, or `chat_template` of tokenizer_config.json (a string, or a
  // list of named ones, of which `name` is taken). The special tokens of tokenizer_config.json (bos_token, eos_token
  // and others, as strings or objects with `content`) become variables. kNotFound: no template, or none of that name.
  static Result<ChatTemplate> Load(const std::string& directory, std::string_view name = "default");

  // The prompt. `variables` is an object: messages, add_generation_prompt, tools and whatever else the template reads;
  // the order of its keys is the order of `tojson` and of loops. `now` (seconds since 1970, UTC) is what strftime_now
  // shows. kInvalidArgument: the template raised an exception or misused a value (line, why), strings that are not
  // UTF-8, strftime_now without `now`. kOutOfRange: a limit (line).
  Result<std::string> Render(const nlohmann::ordered_json& variables, std::optional<int64_t> now = std::nullopt,
                             const ChatTemplateLimits& limits = {}) const;

  const std::string& source() const;

  struct Program;  // private to text/ (template_ast.h)

 private:
  ChatTemplate() = default;
  std::shared_ptr<const Program> program_;
};

}  // namespace livequant
