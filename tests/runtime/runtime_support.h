// tests/runtime/runtime_support.h: tiny models and schemas for the tests of this folder.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
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

// `tiny` as a Mistral whose queries see `window` rows in every layer.
inline std::shared_ptr<const Llama> LoadWindowed(const TinyLlama& tiny, int window) {
  const TempDir dir;
  tiny.Write(dir.path());
  std::string config = tiny.ConfigJson();
  for (const auto& [from, to] :
       {std::pair<std::string, std::string>("\"LlamaForCausalLM\"", "\"MistralForCausalLM\""),
        {"\"model_type\":\"llama\"", "\"model_type\":\"mistral\",\"sliding_window\":" + std::to_string(window)}})
    config.replace(config.find(from), from.size(), to);
  WriteText(dir.path() / "config.json", config);
  auto model = Llama::Load(dir.path().string());
  EXPECT_TRUE(model.ok()) << model.status().ToString();
  return *model;
}

inline CacheSchema SchemaOf(const Llama& model, const std::string& name, int read_step = kStepwise) {
  auto schema = PresetSchema(name, model.config().shape());
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
