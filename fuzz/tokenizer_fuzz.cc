// fuzz/tokenizer_fuzz.cc: any tokenizer.json is a tokenizer or an error; encoding and decoding return the text.
//
// Input: JSON, a NUL byte, a text. The JSON is a merge patch (RFC 7396) of a tokenizer over a few bytes, so that small
// inputs reach everything behind the parser; the input as a whole is also tried as a tokenizer.json of its own. A patch
// with "model": {"type": "Unigram"} is applied to a second base of that kind, one with "byte_fallback" to a third.
#include "fuzz_main.h"
#include "io/json.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

using namespace livequant;
using nlohmann::json;

namespace {

const json& Base() {
  static const json base = *ParseJson(R"({
    "version": "1.0", "truncation": null, "padding": null,
    "added_tokens": [{"id": 0, "content": "<s>", "special": true}, {"id": 40, "content": "<s>>", "normalized": false}],
    "normalizer": null,
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
      {"type": "Split", "pattern": {"Regex": "\\p{N}|[^\\s\\p{L}]+"}, "behavior": "Isolated", "invert": false},
      {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true}]},
    "post_processor": {"type": "TemplateProcessing",
      "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
      "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "ignore_merges": false,
      "vocab": {"<s>": 0, "a": 1, "b": 2, "c": 3, "\u0120": 4, "\u010a": 5, "1": 6, "'": 7, "<": 8, ">": 9, "s": 10, "\u00c3": 11,
                "\u00a9": 12,
                "\u00f0": 13, "\u0141": 14, "\u013a": 15, "\u0122": 16, "ab": 17, "\u0120a": 18, "abc": 19, "bc": 20, "\u00c3\u00a9": 21},
      "merges": ["a b", ["\u0120", "a"], "ab c", "b c", "\u00c3 \u00a9"]}})",
                                      "base");
  return base;
}

// SentencePiece's two kinds.
const json& UnigramBase() {
  static const json base = *ParseJson(R"({
    "added_tokens": [{"id": 0, "content": "<s>", "special": true}],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKD"},
      {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]},
    "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": true},
    "decoder": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": true},
    "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": false,
      "vocab": [["<s>", 0], ["\u2581", -2], ["a", -3], ["b", -3.5], ["ab", -4], ["\u2581ab", -3.25], ["\u00e9", -5]]}})",
                                      "base");
  return base;
}
const json& FallbackBase() {
  static const json base = *ParseJson(R"({
    "added_tokens": [{"id": 0, "content": "<s>", "special": true}],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"},
      {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
    "pre_tokenizer": null,
    "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
      {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
    "model": {"type": "BPE", "unk_token": "<s>", "fuse_unk": true, "byte_fallback": true,
      "vocab": {"<s>": 0, "\u2581": 1, "a": 2, "b": 3, "ab": 4, "\u2581a": 5, "<0xC3>": 6, "<0xA9>": 7, "<0xE4>": 8},
      "merges": ["a b", "\u2581 a"]}})",
                                      "base");
  return base;
}

// The text comes back from its ids unless the file asks for a change of it.
bool KeepsText(const json& file) {
  const auto field = [&](const char* name) { return file.contains(name) ? file.at(name) : json(); };  // a patch removes
  const std::string pre = field("pre_tokenizer").dump();
  return field("normalizer").is_null() && field("added_tokens") == Base()["added_tokens"] &&
         pre.find("Removed") == pre.npos && pre.find("\"add_prefix_space\":false") != pre.npos &&
         pre.find("\"add_prefix_space\":true") == pre.npos;
}

void Use(const Tokenizer& tokenizer, std::string_view text, bool keeps_text) {
  const auto ids = tokenizer.Encode(text, false);
  if (!ids.ok()) {
    CheckPrintable(ids.status().message());
    return;
  }
  const auto back = tokenizer.Decode(*ids, false);
  LQ_CHECK(back.ok());
  if (keeps_text) LQ_CHECK(*back == text);
  StreamingDetokenizer stream(tokenizer);
  std::string streamed;
  for (const int32_t id : *ids) {
    LQ_CHECK(id >= 0 && id < tokenizer.vocab_size());
    const auto piece = stream.Push(id);
    LQ_CHECK(piece.ok() && InvalidUtf8At(*piece) == std::string::npos);
    streamed += *piece;
  }
  streamed += stream.Finish();
  LQ_CHECK(streamed == *tokenizer.Decode(*ids));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input = AsText(data, size);
  const std::string_view head = input.substr(0, input.find('\0'));
  const std::string_view text = head.size() < input.size() ? input.substr(head.size() + 1) : std::string_view();
  if (const auto whole = Tokenizer::Parse(head); whole.ok()) Use(*whole, text, false);
  const auto patch = ParseJson(head, "patch");
  if (!patch.ok()) return 0;
  json file = Base();
  if (patch->is_object() && patch->contains("model") && (*patch)["model"].is_object()) {
    if ((*patch)["model"].contains("type") && (*patch)["model"]["type"] == "Unigram") file = UnigramBase();
    if ((*patch)["model"].contains("byte_fallback") && file["model"]["type"] == "BPE") file = FallbackBase();
  }
  const bool byte_level = file["model"] == Base()["model"];
  file.merge_patch(*patch);
  const auto tokenizer = Tokenizer::Parse(file.dump());
  if (!tokenizer.ok()) {
    CheckPrintable(tokenizer.status().message());
    return 0;
  }
  Use(*tokenizer, text, byte_level && KeepsText(file));
  return 0;
}
