// fuzz/policy_fuzz.cc: any policy text is a valid schema or an error; a schema written as a policy reads back the same.
#include "fuzz_main.h"
#include "method/method.h"

using namespace livequant;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const CacheShape shape{.num_layers = 4, .num_kv_heads = 2, .head_dim = 64, .rope = {}};
  const auto schema = ParsePolicy(AsText(data, size), shape);
  if (!schema.ok()) {
    CheckPrintable(schema.status().message());
    return 0;
  }
  const std::string text = PolicyJson(*schema);
  const auto again = ParsePolicy(text, shape);
  LQ_CHECK(again.ok());
  LQ_CHECK(Compatible(*schema, *again).ok());
  LQ_CHECK(schema->provenance.scale_source == again->provenance.scale_source);
  LQ_CHECK(PolicyJson(*again) == text);
  return 0;
}
