// tests/text/tokenizer_ids.cc: ids of a whole corpus, for tools/tokenizer_compare.mjs.
//
//   tokenizer_ids TOKENIZER CORPUS.jsonl > IDS.jsonl
//
// TOKENIZER is a tokenizer.json or a GGUF file (.gguf). CORPUS holds one JSON string a line, or {"hex": bytes that are
// not UTF-8}. A line of the output is {"ids", "text"}: ids without special tokens, and what they decode to; or
// {"error"}. The last line says how fast the encoding alone was.
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "text/gguf_tokenizer.h"
#include "text/tokenizer.h"

using namespace livequant;
using nlohmann::json;

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: tokenizer_ids TOKENIZER CORPUS.jsonl\n");
    return 2;
  }
  const Result<Tokenizer> tokenizer =
      std::string(argv[1]).ends_with(".gguf") ? LoadGgufTokenizer(argv[1]) : Tokenizer::Load(argv[1]);
  if (!tokenizer.ok()) {
    std::fprintf(stderr, "%s\n", tokenizer.status().ToString().c_str());
    return 1;
  }
  std::ifstream corpus(argv[2]);
  double seconds = 0, bytes = 0;
  for (std::string line; std::getline(corpus, line);) {
    const json entry = json::parse(line);
    std::string text;
    if (entry.is_string()) {
      text = entry.get<std::string>();
    } else {
      const std::string hex = entry["hex"].get<std::string>();
      for (size_t i = 0; i + 1 < hex.size(); i += 2)
        text += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
    }
    const auto start = std::chrono::steady_clock::now();
    const Result<std::vector<int32_t>> ids = tokenizer->Encode(text, false);
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    bytes += static_cast<double>(text.size());
    json out;
    if (ids.ok()) {
      out["ids"] = *ids;
      out["text"] = *tokenizer->Decode(*ids, false);
    } else {
      out["error"] = ids.status().ToString();
    }
    std::cout << out.dump() << "\n";
  }
  std::cout << json{{"bytes", bytes}, {"megabytes_per_second", bytes / seconds / 1e6}}.dump() << "\n";
  return 0;
}
