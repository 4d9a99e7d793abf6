// tests/runtime/runtime_support.h: tiny models and schemas for the tests of this folder.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "base/rng.h"
#include "method/method.h"
#include "model/llama.h"
#include "model/tiny_llama.h"
#include "schema/schema.h"

namespace livequant {

// `tiny` as it is, through its files.
inline std::shared_ptr<const Llama> LoadFrom(const TinyLlama& tiny) {
  const TempDir dir;
  tiny.Write(dir.path());
  auto model = Llama::Load(dir.path().string());
  EXPECT_TRUE(model.ok()) << model.status().ToString();
  return *model;
}

inline CacheSchema SchemaOf(const Llama& model, const std::string& name, int read_step = kStepwise) {
  const LlamaConfig& c = model.config();
  auto schema = PresetSchema(name, {.num_layers = c.num_hidden_layers,
                                    .num_kv_heads = c.num_key_value_heads,
                                    .head_dim = c.head_dim,
                                    .rope = c.rope});
  EXPECT_TRUE(schema.ok()) << schema.status().ToString();
  schema->read_step = read_step;
  return *schema;
}

// `count` ids in [lowest, vocab).
inline std::vector<int32_t> RandomTokens(Rng& rng, int64_t count, int64_t vocab, int64_t lowest = 0) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int32_t>(rng.Range(lowest, vocab - 1)));
  return ids;
}

}  // namespace livequant
