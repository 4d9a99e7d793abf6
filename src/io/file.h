// io/file.h: whole files in, whole files out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace livequant {

// A read-only mapping of a whole regular file. kNotFound, kIo name the path.
class MappedFile {
 public:
  static Result<MappedFile> Open(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  MappedFile() = default;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// kOutOfRange: larger than max_bytes (both numbers named).
Result<std::string> ReadFile(const std::string& path, int64_t max_bytes = int64_t{1} << 30);
// Writes beside the path and renames: the file is whole or as it was.
Status WriteFile(const std::string& path, std::string_view contents);

// SHA-256, lower-case hex.
std::string Sha256Hex(std::span<const std::byte> bytes);
// SHA-256 over several pieces, each preceded by its length: no two lists of pieces collide by concatenation.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  void Add(std::span<const std::byte> piece);
  void Add(std::string_view piece);
  std::string Hex();  // ends the digest

 private:
  void* context_;
};

}  // namespace livequant
