// tests/support/gguf_builder.h: GGUF files byte by byte, good ones and bad ones.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace livequant {

template <class T>
std::string LittleEndian(T value) {
  std::string out(sizeof value, '\0');
  std::memcpy(out.data(), &value, sizeof value);
  return out;
}
inline std::string GgufString(std::string_view s) { return LittleEndian(uint64_t{s.size()}).append(s); }

struct GgufBuilder {
  struct Tensor {
    std::string name;
    std::vector<uint64_t> dims;  // innermost first, as in the file
    uint32_t type = 0;
    std::string bytes;
    int64_t offset = -1;  // -1: where it belongs
  };
  std::vector<std::pair<std::string, std::string>> pairs;  // key, type and value
  std::vector<Tensor> tensors;
  std::string magic = "GGUF";
  uint32_t version = 3;
  size_t alignment = 32;
  int64_t tensor_count = -1, pair_count = -1;  // -1: as many as there are

  static std::string U32(uint32_t v) { return LittleEndian(uint32_t{4}) + LittleEndian(v); }
  static std::string F32(float v) { return LittleEndian(uint32_t{6}) + LittleEndian(v); }
  static std::string Bool(uint8_t v) { return LittleEndian(uint32_t{7}) + LittleEndian(v); }
  static std::string String(std::string_view s) { return LittleEndian(uint32_t{8}) + GgufString(s); }
  static std::string Array(uint32_t element, uint64_t count, std::string_view bytes) {
    return (LittleEndian(uint32_t{9}) + LittleEndian(element) + LittleEndian(count)).append(bytes);
  }
  static std::string Strings(const std::vector<std::string>& items) {
    std::string bytes;
    for (const std::string& s : items) bytes += GgufString(s);
    return Array(8, items.size(), bytes);
  }
  static std::string Integers(const std::vector<int32_t>& items) {
    std::string bytes;
    for (const int32_t i : items) bytes += LittleEndian(i);
    return Array(5, items.size(), bytes);
  }
  static std::string Floats(const std::vector<float>& items) {
    std::string bytes;
    for (const float x : items) bytes += LittleEndian(x);
    return Array(6, items.size(), bytes);
  }

  std::string* Find(std::string_view key) {
    for (auto& [k, v] : pairs)
      if (k == key) return &v;
    return nullptr;
  }
  void Set(const std::string& key, std::string value) {
    if (std::string* v = Find(key))
      *v = std::move(value);
    else
      pairs.emplace_back(key, std::move(value));
  }
  void Remove(std::string_view key) {
    std::erase_if(pairs, [&](const auto& p) { return p.first == key; });
  }

  std::string Bytes() const {
    std::string out = magic + LittleEndian(version) +
                      LittleEndian(tensor_count < 0 ? uint64_t{tensors.size()} : static_cast<uint64_t>(tensor_count)) +
                      LittleEndian(pair_count < 0 ? uint64_t{pairs.size()} : static_cast<uint64_t>(pair_count));
    for (const auto& [key, value] : pairs) out += GgufString(key) + value;
    std::string data;
    for (const Tensor& t : tensors) {
      data.append((alignment - data.size() % alignment) % alignment, '\0');
      out += GgufString(t.name) + LittleEndian(static_cast<uint32_t>(t.dims.size()));
      for (const uint64_t d : t.dims) out += LittleEndian(d);
      out +=
          LittleEndian(t.type) + LittleEndian(t.offset < 0 ? uint64_t{data.size()} : static_cast<uint64_t>(t.offset));
      data += t.bytes;
    }
    if (!tensors.empty()) out.append((alignment - out.size() % alignment) % alignment, '\0');
    return out + data;
  }
};

}  // namespace livequant
