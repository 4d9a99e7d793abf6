// fuzz/detokenizer_fuzz.cc: a stream of any ids gives Decode's text, in pieces that never end inside a character.
//
// Input: ids of one byte each. 0..253 are single bytes in a shuffled order, 254 is a special token, 255 no token at
// all.
#include <vector>

#include "fuzz_main.h"
#include "io/json.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

using namespace livequant;
using nlohmann::json;

namespace {

const Tokenizer& Bytes() {
  static const Tokenizer tokenizer = [] {
    json vocab = json::object();
    int next = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      const int c = printable ? byte : next++;
      std::string spelling;
      if (c < 0x80) {
        spelling = std::string(1, static_cast<char>(c));
      } else {
        spelling = {static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 63))};
      }
      const int id = (byte * 167) % 256;
      if (id < 254) vocab[spelling] = id;
    }
    const json file = {{"added_tokens", {{{"id", 254}, {"content", "<s>"}, {"special", true}}}},
                       {"pre_tokenizer", {{"type", "ByteLevel"}}},
                       {"decoder", {{"type", "ByteLevel"}}},
                       {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", json::array()}}}};
    return *Tokenizer::Parse(file.dump());
  }();
  return tokenizer;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  StreamingDetokenizer stream(Bytes());
  std::vector<int32_t> ids;
  std::string streamed, bytes;
  for (size_t i = 0; i < size; ++i) {
    const auto piece = stream.Push(data[i]);
    LQ_CHECK(piece.ok() == (data[i] < 255));
    if (!piece.ok()) continue;  // and nothing changed
    LQ_CHECK(InvalidUtf8At(*piece) == std::string::npos);
    ids.push_back(data[i]);
    bytes += *Bytes().TokenBytes(data[i]);
    streamed += *piece;
  }
  streamed += stream.Finish();
  LQ_CHECK(streamed == *Bytes().Decode(ids));
  if (InvalidUtf8At(bytes) == std::string::npos) LQ_CHECK(streamed == bytes);
  return 0;
}
