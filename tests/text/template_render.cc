// tests/text/template_render.cc: a chat template over many conversations, for tools/template_compare.py.
//
//   template_render TEMPLATE.jinja CASES.jsonl > OUT.jsonl
//
// A line of CASES is an object of variables; a line of the output is {"text"} or {"error"}.
#include <cstdio>
#include <fstream>
#include <iostream>

#include "io/file.h"
#include "text/chat_template.h"

using namespace livequant;

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: template_render TEMPLATE.jinja CASES.jsonl\n");
    return 2;
  }
  const Result<std::string> source = ReadFile(argv[1]);
  const Result<ChatTemplate> chat = source.ok() ? ChatTemplate::Parse(*source) : Result<ChatTemplate>(source.status());
  if (!chat.ok()) {
    std::fprintf(stderr, "%s: %s\n", argv[1], chat.status().ToString().c_str());
    return 1;
  }
  std::ifstream cases(argv[2]);
  for (std::string line; std::getline(cases, line);) {
    const Result<std::string> text = chat->Render(nlohmann::ordered_json::parse(line), 1718000000);
    nlohmann::json out;
    if (text.ok()) {
      out["text"] = *text;
    } else {
      out["error"] = text.status().ToString();
    }
    std::cout << out.dump() << "\n";
  }
  return 0;
}
