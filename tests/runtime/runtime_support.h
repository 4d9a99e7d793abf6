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
#include "support/effort.h"
#include "support/values.h"

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

// Every preset; under a sanitizer one of each kind of storage.
inline std::vector<std::string> PresetsToTry() {
  if (kInstrumented) return {"f16", "fp8_e4m3", "int4", "kivi2", "qserve8"};
  return PresetNames();
}

}  // namespace livequant
