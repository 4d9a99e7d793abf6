// fuzz/index_fuzz.cc: a directory of shards: what is accepted is what the index lists, no more and no less.
//
// Input, parts separated by NUL bytes: the index, then the JSON headers of a.safetensors, b.safetensors and
// c.safetensors, each of which gets 8 bytes of data.
#include <nlohmann/json.hpp>

#include "fuzz_main.h"
#include "io/safetensors.h"
#include "temp_dir.h"

using namespace livequant;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view input = AsText(data, size);
  FuzzDir& dir = FuzzDir::Get();
  dir.Clear();
  const std::string index(NextPart(&input));
  dir.Write("model.safetensors.index.json", index);
  for (const char* name : {"a.safetensors", "b.safetensors", "c.safetensors"})
    if (!input.empty()) dir.Write(name, SafetensorsFile(NextPart(&input), "01234567"));
  const auto model = Safetensors::OpenDirectory(dir.path());
  if (!model.ok()) {
    CheckPrintable(model.status().message());
    return 0;
  }
  const nlohmann::json map = nlohmann::json::parse(index)["weight_map"];
  LQ_CHECK(map.size() == model->tensors().size());
  uint64_t bytes = 0;
  for (const auto& [name, t] : model->tensors()) {
    LQ_CHECK(map.contains(name));
    bytes += t.bytes.size();
  }
  LQ_CHECK(bytes == 8 * model->paths().size());  // every shard is covered
  return 0;
}
