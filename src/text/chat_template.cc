// text/chat_template.cc: where a template comes from: chat_template.jinja or tokenizer_config.json.
#include "text/chat_template.h"

#include <fmt/format.h>

#include "io/file.h"
#include "io/json.h"
#include "text/template_ast.h"
#include "text/utf8.h"

namespace livequant {
namespace {

using nlohmann::json;

// The text of a special token: a string, or an object with its content.
const std::string* TokenText(const json& value) {
  if (value.is_string()) return value.get_ptr<const std::string*>();
  if (!value.is_object() || !value.contains("content")) return nullptr;
  return value["content"].get_ptr<const std::string*>();
}

Result<std::string> NamedTemplate(const json& value, const std::string& path, std::string_view name) {
  if (value.is_string() && name == "default") return value.get<std::string>();
  if (value.is_array()) {
    for (size_t i = 0; i < value.size(); ++i) {
      const json& entry = value[i];
      if (!entry.is_object() || !entry.contains("name") || !entry.contains("template") || !entry["name"].is_string() ||
          !entry["template"].is_string())
        return Status(Code::kInvalidArgument, fmt::format("{}: chat_template[{}] is not {{name, template}}", path, i));
      if (entry["name"] == name) return entry["template"].get<std::string>();
    }
  } else if (!value.is_null() && !value.is_string()) {
    return Status(Code::kInvalidArgument, fmt::format("{}: chat_template is {}", path, value.type_name()));
  }
  return Status(Code::kNotFound, fmt::format("{}: no chat template {}", path, Excerpt(name)));
}

}  // namespace

Result<ChatTemplate> ChatTemplate::Parse(std::string_view source) {
  if (source.size() > ChatTemplateLimits::kMaxSource)
    return Status(Code::kOutOfRange,
                  fmt::format("chat template: {} bytes, limit {}", source.size(), ChatTemplateLimits::kMaxSource));
  if (const size_t at = InvalidUtf8At(source); at != source.npos)
    return Status(Code::kInvalidArgument, fmt::format("chat template: not UTF-8 at byte {}", at));
  auto program = std::make_shared<Program>();
  program->source = source;
  LQ_RETURN_IF_ERROR(ParseTemplate(source, &program->body));
  ChatTemplate chat;
  chat.program_ = std::move(program);
  return chat;
}

Result<ChatTemplate> ChatTemplate::Load(const std::string& directory, std::string_view name) {
  const std::string path = directory + "/tokenizer_config.json";
  json config = json::object();
  if (const Result<std::string> text = ReadFile(path, JsonLimits{}.max_bytes); text.ok()) {
    LQ_ASSIGN_OR_RETURN(config, ParseJson(*text, path));
    if (!config.is_object()) return Status(Code::kInvalidArgument, fmt::format("{}: not an object", path));
  } else if (text.status().code() != Code::kNotFound) {
    return text.status();
  }
  std::string source;
  Result<std::string> file = ReadFile(directory + "/chat_template.jinja", ChatTemplateLimits::kMaxSource);
  if (file.ok() && name == "default") {
    source = *std::move(file);
  } else if (!file.ok() && file.status().code() != Code::kNotFound) {
    return file.status();
  } else {
    LQ_ASSIGN_OR_RETURN(source,
                        NamedTemplate(config.contains("chat_template") ? config["chat_template"] : json(), path, name));
  }
  LQ_ASSIGN_OR_RETURN(ChatTemplate chat, Parse(source));
  auto program = std::const_pointer_cast<Program>(chat.program_);  // made above, and nobody else has it
  for (const auto& [key, value] : config.items())
    if (key.ends_with("_token"))
      if (const std::string* text = TokenText(value)) program->globals[key] = *text;
  return chat;
}

Result<std::string> ChatTemplate::Render(const nlohmann::ordered_json& variables, std::optional<int64_t> now,
                                         const ChatTemplateLimits& limits) const {
  return RenderTemplate(*program_, variables, now, limits);
}

const std::string& ChatTemplate::source() const { return program_->source; }

}  // namespace livequant
