// fuzz/config_fuzz.cc: any config.json is a configuration or an error.
#include "fuzz_main.h"
#include "model/llama.h"

using namespace livequant;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto config = ParseLlamaConfig(AsText(data, size));
  if (!config.ok()) CheckPrintable(config.status().message());
  return 0;
}
