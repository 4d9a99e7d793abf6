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

// A read-only mapping of a whole regular file. The bytes live as long as the object, wherever it moves. A file that
// somebody shortens while it is mapped ends the process (SIGBUS): model files are replaced by rename, as WriteFile
// does.
class MappedFile {
 public:
  // kNotFound: no such file. kIo: the system refused, or not a regular file. Both name the path.
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

// The bytes of a regular file. kNotFound, kIo as above; kOutOfRange: larger than max_bytes (both numbers named).
Result<std::string> ReadFile(const std::string& path, int64_t max_bytes = int64_t{1} << 30);
// Writes beside the path, syncs and renames: after a crash at any moment the file is whole or as it was. Keeps the mode
// of the file that it replaces and follows a symbolic link. kIo names the path: a place that can't be written, or
// something there that is no regular file.
Status WriteFile(const std::string& path, std::string_view contents);

// SHA-256 (FIPS 180-4), lower-case hex.
std::string Sha256Hex(std::span<const std::byte> bytes);
// SHA-256 over several pieces, each preceded by its length (8 bytes, little endian): no two lists of pieces collide by
// concatenation.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;
  void Add(std::span<const std::byte> piece);
  void Add(std::string_view piece);
  std::string Hex();  // ends the digest: nothing may be called after it

 private:
  void* context_;
};

}  // namespace livequant
