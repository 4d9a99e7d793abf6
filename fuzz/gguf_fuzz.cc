// fuzz/gguf_fuzz.cc: what Gguf::Parse accepts lies inside the file without overlap, and what its metadata means (a
// config, a tokenizer) is a value or a printable refusal. Input: a whole file.
#include <map>

#include "fuzz_main.h"
#include "io/gguf.h"
#include "model/gguf_source.h"
#include "model/llama.h"
#include "text/gguf_tokenizer.h"
#include "text/tokenizer.h"

using namespace livequant;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto file = std::as_bytes(std::span(data, size));
  const auto gguf = Gguf::Parse(file, "fuzz");
  if (!gguf.ok()) {
    CheckPrintable(gguf.status().message());
    return 0;
  }
  std::map<const std::byte*, const std::byte*> extents;
  for (const auto& [name, t] : gguf->tensors()) {
    int64_t rows = 1;
    for (size_t i = 0; i + 1 < t.shape.size(); ++i) LQ_CHECK(!__builtin_mul_overflow(rows, t.shape[i], &rows));
    LQ_CHECK(static_cast<int64_t>(t.bytes.size()) == rows * GgufRowBytes(t.dtype, t.shape.back()));
    LQ_CHECK(extents.emplace(t.bytes.data(), t.bytes.data() + t.bytes.size()).second);
  }
  const std::byte* covered = file.data();
  for (const auto& [begin, end] : extents) {
    LQ_CHECK(begin >= covered && end <= file.data() + file.size());
    covered = end;
  }

  const auto config = GgufConfigJson(*gguf, "fuzz");
  if (config.ok()) {
    const auto source = GgufSource::Make(*gguf, "fuzz");
    if (!source.ok()) CheckPrintable(source.status().message());
    const auto parsed = ParseLlamaConfig(*config);
    if (!parsed.ok()) CheckPrintable(parsed.status().message());
    if (source.ok())
      for (const auto& [name, t] : (*source)->tensors()) {
        std::vector<std::byte> row(static_cast<size_t>(t.cols() * DTypeBytes(t.dtype)));
        (*source)->Read(name, t.rows() - 1, 1, row.data());
      }
  } else {
    CheckPrintable(config.status().message());
  }

  const auto tokenizer = GgufTokenizer(*gguf, "fuzz");
  if (!tokenizer.ok()) {
    CheckPrintable(tokenizer.status().message());
    return 0;
  }
  const auto ids = tokenizer->Encode("It's  42\n\xC3\xA9 abab", true);
  if (!ids.ok()) {
    CheckPrintable(ids.status().message());
    return 0;
  }
  for (const int32_t id : *ids) LQ_CHECK(id >= 0 && id < tokenizer->vocab_size());
  LQ_CHECK(tokenizer->Decode(*ids).ok());
  return 0;
}
