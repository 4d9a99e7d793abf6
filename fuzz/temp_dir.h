// fuzz/temp_dir.h: one folder of this process for targets whose parsers open files; emptied before each input, removed
// at exit.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "base/check.h"

namespace livequant {

class FuzzDir {
 public:
  static FuzzDir& Get() {
    static FuzzDir dir;
    return dir;
  }
  const std::string& path() const { return path_; }
  void Clear() {
    for (const auto& entry : std::filesystem::directory_iterator(path_)) std::filesystem::remove_all(entry);
  }
  void Write(const std::string& name, std::string_view bytes) {
    std::ofstream file(path_ + "/" + name, std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    LQ_CHECK(file.good());
  }

 private:
  FuzzDir() {
    path_ = (std::filesystem::temp_directory_path() / "livequant_fuzz_XXXXXX").string();
    LQ_CHECK(::mkdtemp(path_.data()) != nullptr);
  }
  ~FuzzDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string path_;
};

// The next part of an input whose parts are separated by a NUL byte.
inline std::string_view NextPart(std::string_view* input) {
  const size_t end = input->find('\0');
  const std::string_view part = input->substr(0, end);
  *input = end == input->npos ? std::string_view() : input->substr(end + 1);
  return part;
}

// A safetensors file of a JSON header and its data.
inline std::string SafetensorsFile(std::string_view header, std::string_view data) {
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>(uint64_t{header.size()} >> (8 * i));
  return file.append(header).append(data);
}

}  // namespace livequant
