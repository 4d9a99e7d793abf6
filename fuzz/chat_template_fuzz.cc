// fuzz/chat_template_fuzz.cc: any template is refused or renders within its limits to UTF-8; errors are printable.
//
// Input: a template, and optionally a NUL byte and a JSON object of variables; without one a small conversation is
// given.
#include "fuzz_main.h"
#include "text/chat_template.h"
#include "text/utf8.h"

using namespace livequant;
using nlohmann::ordered_json;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const ordered_json conversation = ordered_json::parse(R"({"bos_token": "<s>", "eos_token": "</s>",
    "add_generation_prompt": true, "messages": [{"role": "system", "content": " be brief\n"},
    {"role": "user", "content": "a b"}, {"role": "assistant", "content": null, "tool_calls": [{"id": "abcdefghi",
    "function": {"name": "f", "arguments": {"x": [1, 2.5, "y"]}}}]}, {"role": "tool", "content": "3"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]})");
  const std::string_view input = AsText(data, size);
  const std::string_view source = input.substr(0, input.find('\0'));
  ordered_json variables = conversation;
  if (source.size() < input.size()) {
    const ordered_json given = ordered_json::parse(input.substr(source.size() + 1), nullptr, false);
    if (!given.is_discarded()) variables = given;
  }
  const auto chat = ChatTemplate::Parse(source);
  if (!chat.ok()) {
    CheckPrintable(chat.status().message());
    return 0;
  }
  ChatTemplateLimits limits;
  limits.max_steps = 20000;
  limits.max_bytes = 1 << 20;
  limits.max_times = 0;
  const auto text = chat->Render(variables, 1718000000, limits);
  if (text.ok()) {
    LQ_CHECK(InvalidUtf8At(*text) == std::string::npos);
    LQ_CHECK(text->size() <= static_cast<size_t>(limits.max_bytes));
  } else {
    CheckPrintable(text.status().message());
  }
  return 0;
}
