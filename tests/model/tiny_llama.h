// tests/model/tiny_llama.h: small random Llamas: written to a directory as Hugging Face would, and computed by hand in
// double. The oracle shares no line with src/: it is loops over the formulas.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "base/rng.h"
#include "numeric/dtype.h"
#include "schema/schema.h"

namespace livequant {

struct TinyTensor {
  std::vector<int64_t> shape;
  std::vector<float> values;
  std::string dtype = "F32";  // "F32", "F16", "BF16"; values are already rounded to it
};

struct TinyLlama {
  int layers = 2, heads = 4, kv_heads = 2, head_dim = 32;
  int64_t hidden = 48, intermediate = 40, vocab = 61, max_positions = 1024;
  bool tied = true;
  double theta = 10000, eps = 1e-5;
  std::string eos = "[1,2]";  // eos_token_id as config.json has it
  std::map<std::string, TinyTensor> tensors = {};

  // Random weights of `dtype`; norms near 1.
  void Fill(Rng& rng, const std::string& dtype);
  std::string ConfigJson() const;
  // config.json and model.safetensors.
  void Write(const std::filesystem::path& directory) const;
  // Logits of every row of `tokens`, [rows][vocab].
  std::vector<double> Logits(const std::vector<int32_t>& tokens) const;
  // A cache of exact f32 rows.
  CacheSchema F32Schema() const;
};

// The bytes of a safetensors file.
std::string SafetensorsBytes(const std::map<std::string, TinyTensor>& tensors);

// A directory that is removed with its contents.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

void WriteText(const std::filesystem::path& path, const std::string& text);

}  // namespace livequant
