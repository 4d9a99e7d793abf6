// fuzz/safetensors_fuzz.cc: accepted headers cover the data exactly: no gap, no overlap, sizes as shape and dtype say.
//
// Input: the JSON header, a NUL byte, the data. The length in front is made here, so that the fuzzer need not guess it;
// an input that starts with 0xFF is taken as a whole file.
#include <algorithm>
#include <map>

#include "fuzz_main.h"
#include "io/safetensors.h"

using namespace livequant;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view input = AsText(data, size);
  std::string file;
  if (input.starts_with('\xFF')) {
    file = input.substr(1);
  } else {
    const std::string_view header = input.substr(0, input.find('\0'));
    for (int i = 0; i < 8; ++i) file += static_cast<char>(uint64_t{header.size()} >> (8 * i));
    file += header;
    if (header.size() < input.size()) file += input.substr(header.size() + 1);
  }
  const auto bytes = std::as_bytes(std::span(file.data(), file.size()));
  std::map<std::string, std::string> metadata;
  const auto tensors = Safetensors::ParseHeader(bytes, "fuzz", &metadata);
  if (!tensors.ok()) {
    CheckPrintable(tensors.status().message());
    return 0;
  }
  uint64_t header_bytes = 0;
  for (size_t i = 0; i < 8; ++i) header_bytes |= uint64_t{static_cast<uint8_t>(file[i])} << (8 * i);
  std::vector<bool> covered(file.size() - 8 - header_bytes, false);
  for (const auto& [name, tensor] : *tensors) {
    const auto begin = static_cast<size_t>(tensor.bytes.data() - (bytes.data() + 8 + header_bytes));
    for (size_t i = begin; i < begin + tensor.bytes.size(); ++i) {
      LQ_CHECK(i < covered.size() && !covered[i]);
      covered[i] = true;
    }
    int64_t count = 1;
    for (const int64_t n : tensor.shape) LQ_CHECK(n >= 0 && !__builtin_mul_overflow(count, n, &count));
    LQ_CHECK(static_cast<uint64_t>(count) <= 2 * tensor.bytes.size());  // no dtype has less than four bits
  }
  for (const bool c : covered) LQ_CHECK(c);

  // What is written is read back.
  const std::string again = SafetensorsText(*tensors, metadata);
  std::map<std::string, std::string> metadata_again;
  const auto back = Safetensors::ParseHeader(std::as_bytes(std::span(again)), "again", &metadata_again);
  LQ_CHECK(back.ok() && metadata_again == metadata && back->size() == tensors->size());
  for (const auto& [name, t] : *tensors) {
    const TensorInfo& b = back->at(name);
    LQ_CHECK(b.dtype == t.dtype && b.shape == t.shape && std::ranges::equal(b.bytes, t.bytes));
  }
  return 0;
}
