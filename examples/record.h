// examples/record.h: reads what `livequant run --record FILE` wrote: a safetensors file with the rows that went into
// each layer's attention, what came out, and the cache's bytes (docs/formats/record.md).
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

struct Tensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::vector<char> bytes;
  std::vector<float> floats() const {
    if (dtype != "F32") throw std::runtime_error("a tensor of rows is " + dtype);
    std::vector<float> out(bytes.size() / sizeof(float));
    std::memcpy(out.data(), bytes.data(), out.size() * sizeof(float));
    return out;
  }
};

struct Record {
  std::map<std::string, Tensor> tensors;
  nlohmann::json shape, rope;
  std::string schema;      // text of a policy
  std::vector<int> steps;  // rows of each step
  float scale = 0;         // of scores
  const Tensor& at(const std::string& name, int layer) const { return tensors.at(name + "." + std::to_string(layer)); }
};

// Throws what is wrong with the file.
inline Record ReadRecord(const char* path) {
  std::ifstream in(path, std::ios::binary);
  const std::vector<char> file((std::istreambuf_iterator<char>(in)), {});
  uint64_t header = 0;
  if (!in || file.size() < 8) throw std::runtime_error("cannot be read, or shorter than 8 bytes");
  std::memcpy(&header, file.data(), 8);
  if (header > file.size() - 8) throw std::runtime_error("the header is longer than the file");
  const auto json = nlohmann::json::parse(file.begin() + 8, file.begin() + 8 + static_cast<int64_t>(header));
  const auto& meta = json.at("__metadata__");
  if (meta.at("format") != "livequant.record" || meta.at("version") != "1")
    throw std::runtime_error("not a livequant.record of version 1");
  Record r;
  r.schema = meta.at("schema");
  r.shape = nlohmann::json::parse(meta.at("shape").get<std::string>());
  r.rope = nlohmann::json::parse(meta.at("rope").get<std::string>());
  r.steps = nlohmann::json::parse(meta.at("steps").get<std::string>()).get<std::vector<int>>();
  r.scale = std::stof(meta.at("scale").get<std::string>());
  for (const auto& [name, t] : json.items()) {
    if (name == "__metadata__") continue;
    const uint64_t begin = t.at("data_offsets").at(0), end = t.at("data_offsets").at(1),
                   size = file.size() - 8 - header;
    if (begin > end || end > size) throw std::runtime_error(name + " lies outside of the file");
    const char* data = file.data() + 8 + header;
    r.tensors[name] = {t.at("dtype"), t.at("shape"), {data + begin, data + end}};
  }
  return r;
}
