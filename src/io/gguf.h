// io/gguf.h: metadata and tensors of a GGUF file, versions 2 and 3. Nothing is copied; every count, length and offset
// is checked against the bytes that are really there before anything is made of it.
//
// Invariants of a file that was parsed: keys and tensor names are unique; tensors lie one behind the other, each at the
// next multiple of the alignment, as the format's own reader wants them; a tensor's bytes are exactly its shape's.
// Source: ggml-org/ggml, docs/gguf.md.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/status.h"

namespace livequant {

// Types of a metadata value, numbered as in the file.
enum class GgufType : uint32_t { kU8, kI8, kU16, kI16, kU32, kI32, kF32, kBool, kString, kArray, kU64, kI64, kF64 };
// "u8", "string", ...
const char* GgufTypeName(GgufType type);

// Elements of one array, in one of three places by their type.
struct GgufArray {
  GgufType element = GgufType::kU8;
  uint64_t count = 0;
  std::span<const std::byte> bytes;       // numbers and bools: as stored, little endian, at any alignment
  std::vector<std::string_view> strings;  // kString: bytes as in the file, not checked to be UTF-8
  std::vector<GgufArray> arrays;          // kArray
};

struct GgufValue {
  GgufType type = GgufType::kU8;
  // kU8..kU64 unsigned; signed; kF32, kF64; kBool; kString; kArray.
  std::variant<uint64_t, int64_t, double, bool, std::string_view, GgufArray> value;
};
// One number of an array of integers. REQUIRES array.element to be an integer type and index < array.count; an
// unsigned value beyond 2^63 - 1 saturates there.
int64_t GgufInteger(const GgufArray& array, uint64_t index);
// One number of an array of kF32. REQUIRES array.element == kF32 and index < array.count.
float GgufFloat(const GgufArray& array, uint64_t index);

// How the weights of a tensor are stored. Blocks of 32 values along a row:
//   Q8_0  f16 scale, 32 x i8         x = code * scale
//   Q4_0  f16 scale, 16 bytes        x = (nibble - 8) * scale; low nibbles are values 0..15, high ones 16..31
enum class GgufDType : uint32_t { kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ8_0 = 8, kBF16 = 30 };
inline constexpr int64_t kGgufBlock = 32;
const char* GgufDTypeName(GgufDType dtype);  // "F32", "Q8_0", ...
// Bytes of a row of `cols` values. REQUIRES cols % kGgufBlock == 0 for block types.
int64_t GgufRowBytes(GgufDType dtype, int64_t cols);

struct GgufTensor {
  GgufDType dtype = GgufDType::kF32;
  std::vector<int64_t> shape;  // outermost first: the file's dimensions turned round; each >= 1
  std::span<const std::byte> bytes;
};

class Gguf {
 public:
  // The whole `file` in; what comes out points into it. `what` names it in messages. kDataLoss: the file is shorter
  // than it says. kUnsupported: version 1 or beyond 3, big endian, a tensor type that is not read, a part of a split
  // file. kOutOfRange: nesting beyond kMaxDepth, sizes that overflow. kInvalidArgument: everything else, repeated keys
  // and names among it. Each message names the thing, the value and the limit.
  static Result<Gguf> Parse(std::span<const std::byte> file, std::string_view what);
  static constexpr int kMaxDepth = 4;         // arrays inside each other
  static constexpr uint64_t kMaxKey = 65535;  // bytes of a key (format) and of a tensor name
  static constexpr uint32_t kMaxDims = 4;     // dimensions of a tensor (format)

  uint32_t version() const { return version_; }
  uint64_t alignment() const { return alignment_; }
  const std::map<std::string, GgufValue, std::less<>>& metadata() const { return metadata_; }
  const std::map<std::string, GgufTensor>& tensors() const { return tensors_; }
  // nullptr: no such key.
  const GgufValue* Find(std::string_view key) const;

 private:
  uint32_t version_ = 0;
  uint64_t alignment_ = 32;
  std::map<std::string, GgufValue, std::less<>> metadata_;
  std::map<std::string, GgufTensor> tensors_;
};

}  // namespace livequant
