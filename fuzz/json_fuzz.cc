// fuzz/json_fuzz.cc: any bytes give a value or an error; a value written out and read again is the same value.
#include "fuzz_main.h"
#include "io/json.h"

using namespace livequant;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto value = ParseJson(AsText(data, size), "fuzz");
  if (!value.ok()) {
    CheckPrintable(value.status().message());
    return 0;
  }
  const std::string text = value->dump();  // would throw on a string that is not UTF-8
  const auto again = ParseJson(text, "fuzz");
  LQ_CHECK(again.ok());
  LQ_CHECK(*again == *value);
  return 0;
}
