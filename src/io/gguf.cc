// io/gguf.cc: magic, version, two counts, key-value pairs, tensor infos, then the tensors, each aligned.
#include "io/gguf.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "base/check.h"
#include "io/json.h"

namespace livequant {
namespace {

static_assert(std::endian::native == std::endian::little, "values are read as they are stored");

constexpr std::string_view kMagic = "GGUF";
constexpr uint64_t kMostAlignment = uint64_t{1} << 20;
// A pair, a tensor or an array inside an array costs up to 300 bytes of memory for 12 of the file; real files have
// fewer than 100 pairs and 4000 tensors.
constexpr uint64_t kMostEntries = uint64_t{1} << 16;
// The fewest bytes that one of each can take: key length, key, type, value; name length, name, dims, one dim, type,
// offset.
constexpr uint64_t kLeastPair = 8 + 1 + 4 + 1, kLeastTensor = 8 + 1 + 4 + 8 + 4 + 8;

// Bytes of one stored value; 0 for strings and arrays, which say their own length.
uint64_t FixedBytes(GgufType type) {
  switch (type) {
    case GgufType::kU8:
    case GgufType::kI8:
    case GgufType::kBool:
      return 1;
    case GgufType::kU16:
    case GgufType::kI16:
      return 2;
    case GgufType::kU32:
    case GgufType::kI32:
    case GgufType::kF32:
      return 4;
    case GgufType::kU64:
    case GgufType::kI64:
    case GgufType::kF64:
      return 8;
    case GgufType::kString:
    case GgufType::kArray:
      return 0;
  }
  return 0;
}

template <class T>
T Load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

// Reads forward through the file; every read says what it was for.
class Cursor {
 public:
  Cursor(std::span<const std::byte> file, std::string_view what) : file_(file), what_(what) {}
  uint64_t at() const { return at_; }
  uint64_t left() const { return file_.size() - at_; }
  std::string_view what() const { return what_; }

  Result<std::span<const std::byte>> Take(uint64_t bytes, std::string_view of) {
    if (bytes > left())
      return Status(Code::kDataLoss, fmt::format("{}: {} takes {} bytes at byte {}; the file has {} more", what_, of,
                                                 bytes, at_, left()));
    const auto part = file_.subspan(at_, bytes);
    at_ += bytes;
    return part;
  }
  template <class T>
  Result<T> Number(std::string_view of) {
    LQ_ASSIGN_OR_RETURN(const auto bytes, Take(sizeof(T), of));
    return Load<T>(bytes.data());
  }
  Result<std::string_view> String(std::string_view of) {
    LQ_ASSIGN_OR_RETURN(const uint64_t length, Number<uint64_t>(of));
    LQ_ASSIGN_OR_RETURN(const auto bytes, Take(length, of));
    return std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }

 private:
  std::span<const std::byte> file_;
  std::string_view what_;
  uint64_t at_ = 0;
};

Result<GgufType> ReadType(Cursor& in, std::string_view of) {
  LQ_ASSIGN_OR_RETURN(const uint32_t type, in.Number<uint32_t>(of));
  if (type > static_cast<uint32_t>(GgufType::kF64))
    return Status(Code::kInvalidArgument, fmt::format("{}: {} has type {}; the format has types 0 to {}", in.what(), of,
                                                      type, static_cast<uint32_t>(GgufType::kF64)));
  return static_cast<GgufType>(type);
}

Status CheckBool(const Cursor& in, std::string_view of, std::byte value) {
  if (value <= std::byte{1}) return {};
  return Status(Code::kInvalidArgument,
                fmt::format("{}: {} holds the bool {}; 0 or 1 is needed", in.what(), of, std::to_integer<int>(value)));
}

Status ReadArray(Cursor& in, std::string_view of, int depth, GgufArray* out) {
  if (depth > Gguf::kMaxDepth)
    return Status(Code::kOutOfRange, fmt::format("{}: {} nests arrays deeper than {}", in.what(), of, Gguf::kMaxDepth));
  LQ_ASSIGN_OR_RETURN(out->element, ReadType(in, of));
  LQ_ASSIGN_OR_RETURN(out->count, in.Number<uint64_t>(of));
  const uint64_t fixed = FixedBytes(out->element);
  // A string takes 8 bytes at least, an array 12: the product can't overflow once the count is below the bytes left.
  const uint64_t least = fixed > 0 ? fixed : out->element == GgufType::kString ? 8 : 12;
  if (out->count > in.left() / least)
    return Status(Code::kDataLoss, fmt::format("{}: {} has {} elements of {} bytes or more; the file has {} more bytes",
                                               in.what(), of, out->count, least, in.left()));
  if (out->element == GgufType::kArray && out->count > kMostEntries)
    return Status(Code::kOutOfRange,
                  fmt::format("{}: {} holds {} arrays, limit {}", in.what(), of, out->count, kMostEntries));
  if (fixed > 0) {
    LQ_ASSIGN_OR_RETURN(out->bytes, in.Take(out->count * fixed, of));
    if (out->element == GgufType::kBool)
      for (const std::byte b : out->bytes) LQ_RETURN_IF_ERROR(CheckBool(in, of, b));
    return {};
  }
  if (out->element == GgufType::kString) {
    out->strings.reserve(out->count);
    for (uint64_t i = 0; i < out->count; ++i) {
      LQ_ASSIGN_OR_RETURN(const std::string_view s, in.String(of));
      out->strings.push_back(s);
    }
    return {};
  }
  for (uint64_t i = 0; i < out->count; ++i) {  // grows as elements are really there: one is many times its bytes
    LQ_RETURN_IF_ERROR(ReadArray(in, of, depth + 1, &out->arrays.emplace_back()));
  }
  return {};
}

Result<GgufValue> ReadValue(Cursor& in, std::string_view of) {
  GgufValue v;
  LQ_ASSIGN_OR_RETURN(v.type, ReadType(in, of));
  if (v.type == GgufType::kString) {
    LQ_ASSIGN_OR_RETURN(v.value, in.String(of));
    return v;
  }
  if (v.type == GgufType::kArray) {
    GgufArray array;
    LQ_RETURN_IF_ERROR(ReadArray(in, of, 1, &array));
    v.value = std::move(array);
    return v;
  }
  LQ_ASSIGN_OR_RETURN(const auto bytes, in.Take(FixedBytes(v.type), of));
  const std::byte* p = bytes.data();
  switch (v.type) {
    case GgufType::kU8:
      v.value = uint64_t{Load<uint8_t>(p)};
      break;
    case GgufType::kI8:
      v.value = int64_t{Load<int8_t>(p)};
      break;
    case GgufType::kU16:
      v.value = uint64_t{Load<uint16_t>(p)};
      break;
    case GgufType::kI16:
      v.value = int64_t{Load<int16_t>(p)};
      break;
    case GgufType::kU32:
      v.value = uint64_t{Load<uint32_t>(p)};
      break;
    case GgufType::kI32:
      v.value = int64_t{Load<int32_t>(p)};
      break;
    case GgufType::kF32:
      v.value = double{Load<float>(p)};
      break;
    case GgufType::kU64:
      v.value = Load<uint64_t>(p);
      break;
    case GgufType::kI64:
      v.value = Load<int64_t>(p);
      break;
    case GgufType::kF64:
      v.value = Load<double>(p);
      break;
    case GgufType::kBool: {
      LQ_RETURN_IF_ERROR(CheckBool(in, of, *p));
      v.value = *p == std::byte{1};
      break;
    }
    default:
      LQ_CHECK(!"strings and arrays are read above");
  }
  return v;
}

// Names of the tensor types that exist and are not read, for messages.
std::string StoredTypeName(uint32_t type) {
  constexpr const char* kNames[] = {
      "F32",     "F16",   "Q4_0",   "Q4_1",  "a removed type", "a removed type", "Q5_0", "Q5_1",    "Q8_0",
      "Q8_1",    "Q2_K",  "Q3_K",   "Q4_K",  "Q5_K",           "Q6_K",           "Q8_K", "IQ2_XXS", "IQ2_XS",
      "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S",          "IQ4_XS",         "I8",   "I16",     "I32",
      "I64",     "F64",   "IQ1_M",  "BF16"};
  if (type < std::size(kNames)) return fmt::format("{} ({})", kNames[type], type);
  return fmt::format("type {}", type);
}

bool IsRead(uint32_t type) {
  for (const GgufDType t : {GgufDType::kF32, GgufDType::kF16, GgufDType::kQ4_0, GgufDType::kQ8_0, GgufDType::kBF16})
    if (type == static_cast<uint32_t>(t)) return true;
  return false;
}

struct Place {
  std::string name;
  GgufTensor tensor;
  uint64_t offset = 0, bytes = 0;
};

Status ReadTensorInfo(Cursor& in, Place* out) {
  LQ_ASSIGN_OR_RETURN(const std::string_view name, in.String("a tensor's name"));
  if (name.empty() || name.size() > Gguf::kMaxKey)
    return Status(Code::kOutOfRange, fmt::format("{}: a tensor's name has {} bytes; 1 to {} are allowed", in.what(),
                                                 name.size(), Gguf::kMaxKey));
  out->name = name;
  const std::string of = "tensor " + Excerpt(name);
  LQ_ASSIGN_OR_RETURN(const uint32_t dims, in.Number<uint32_t>(of));
  if (dims < 1 || dims > Gguf::kMaxDims)
    return Status(Code::kOutOfRange,
                  fmt::format("{}: {} has {} dimensions; 1 to {} are allowed", in.what(), of, dims, Gguf::kMaxDims));
  std::vector<int64_t>& shape = out->tensor.shape;
  shape.resize(dims);
  int64_t values = 1;
  for (uint32_t i = 0; i < dims; ++i) {  // innermost first
    LQ_ASSIGN_OR_RETURN(const uint64_t n, in.Number<uint64_t>(of));
    if (n < 1) return Status(Code::kInvalidArgument, fmt::format("{}: {} has a dimension of 0", in.what(), of));
    // 2^58 values leave room for the widest type's bits.
    if (n > (uint64_t{1} << 58) || __builtin_mul_overflow(values, static_cast<int64_t>(n), &values) ||
        values > (int64_t{1} << 58))
      return Status(Code::kOutOfRange,
                    fmt::format("{}: {} with a dimension of {} has more than 2^58 values", in.what(), of, n));
    shape[dims - 1 - i] = static_cast<int64_t>(n);
  }
  LQ_ASSIGN_OR_RETURN(const uint32_t type, in.Number<uint32_t>(of));
  if (!IsRead(type))
    return Status(Code::kUnsupported, fmt::format("{}: {} is {}; F32, F16, BF16, Q8_0 and Q4_0 are read", in.what(), of,
                                                  StoredTypeName(type)));
  out->tensor.dtype = static_cast<GgufDType>(type);
  const bool blocks = out->tensor.dtype == GgufDType::kQ8_0 || out->tensor.dtype == GgufDType::kQ4_0;
  if (blocks && shape.back() % kGgufBlock != 0)
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: {} has rows of {} values; {} needs a multiple of {}", in.what(), of, shape.back(),
                              GgufDTypeName(out->tensor.dtype), kGgufBlock));
  out->bytes = static_cast<uint64_t>(GgufRowBytes(out->tensor.dtype, shape.back())) *
               static_cast<uint64_t>(values / shape.back());
  LQ_ASSIGN_OR_RETURN(out->offset, in.Number<uint64_t>(of));
  return {};
}

}  // namespace

const char* GgufTypeName(GgufType type) {
  constexpr const char* kNames[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                    "bool", "string", "array", "u64", "i64", "f64"};
  return kNames[static_cast<uint32_t>(type)];
}

const char* GgufDTypeName(GgufDType dtype) {
  switch (dtype) {
    case GgufDType::kF32:
      return "F32";
    case GgufDType::kF16:
      return "F16";
    case GgufDType::kQ4_0:
      return "Q4_0";
    case GgufDType::kQ8_0:
      return "Q8_0";
    case GgufDType::kBF16:
      return "BF16";
  }
  return "?";
}

int64_t GgufRowBytes(GgufDType dtype, int64_t cols) {
  switch (dtype) {
    case GgufDType::kF32:
      return cols * 4;
    case GgufDType::kF16:
    case GgufDType::kBF16:
      return cols * 2;
    case GgufDType::kQ4_0:
      LQ_CHECK(cols % kGgufBlock == 0);
      return cols / kGgufBlock * (2 + 16);
    case GgufDType::kQ8_0:
      LQ_CHECK(cols % kGgufBlock == 0);
      return cols / kGgufBlock * (2 + 32);
  }
  return 0;
}

int64_t GgufInteger(const GgufArray& array, uint64_t index) {
  LQ_CHECK(index < array.count);
  const std::byte* p = array.bytes.data() + index * FixedBytes(array.element);
  switch (array.element) {
    case GgufType::kU8:
      return Load<uint8_t>(p);
    case GgufType::kI8:
      return Load<int8_t>(p);
    case GgufType::kU16:
      return Load<uint16_t>(p);
    case GgufType::kI16:
      return Load<int16_t>(p);
    case GgufType::kU32:
      return Load<uint32_t>(p);
    case GgufType::kI32:
      return Load<int32_t>(p);
    case GgufType::kI64:
      return Load<int64_t>(p);
    case GgufType::kU64: {
      constexpr uint64_t kMost = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
      const uint64_t v = Load<uint64_t>(p);
      return static_cast<int64_t>(v < kMost ? v : kMost);
    }
    default:
      LQ_CHECK(!"an array of no integers");
  }
  return 0;
}

float GgufFloat(const GgufArray& array, uint64_t index) {
  LQ_CHECK(array.element == GgufType::kF32 && index < array.count);
  return Load<float>(array.bytes.data() + index * sizeof(float));
}

const GgufValue* Gguf::Find(std::string_view key) const {
  const auto found = metadata_.find(key);
  return found == metadata_.end() ? nullptr : &found->second;
}

Result<Gguf> Gguf::Parse(std::span<const std::byte> file, std::string_view what) {
  Cursor in(file, what);
  LQ_ASSIGN_OR_RETURN(const auto magic, in.Take(kMagic.size(), "the magic"));
  if (std::memcmp(magic.data(), kMagic.data(), kMagic.size()) != 0)
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: starts with {}, not with \"GGUF\"", what,
                              Excerpt({reinterpret_cast<const char*>(magic.data()), magic.size()})));
  Gguf gguf;
  LQ_ASSIGN_OR_RETURN(gguf.version_, in.Number<uint32_t>("the version"));
  if (gguf.version_ != 0 && (gguf.version_ & 0xFFFF) == 0)
    return Status(Code::kUnsupported,
                  fmt::format("{}: version {:#x} is that of a big-endian file; little-endian ones are read", what,
                              gguf.version_));
  if (gguf.version_ != 2 && gguf.version_ != 3)
    return Status(Code::kUnsupported, fmt::format("{}: version {}; 2 and 3 are read", what, gguf.version_));
  LQ_ASSIGN_OR_RETURN(const uint64_t tensor_count, in.Number<uint64_t>("the number of tensors"));
  LQ_ASSIGN_OR_RETURN(const uint64_t pair_count, in.Number<uint64_t>("the number of metadata pairs"));
  if (pair_count > in.left() / kLeastPair)
    return Status(Code::kDataLoss, fmt::format("{}: {} metadata pairs of {} bytes or more; the file has {} more bytes",
                                               what, pair_count, kLeastPair, in.left()));
  for (const auto& [count, of] : {std::pair(pair_count, "metadata pairs"), std::pair(tensor_count, "tensors")})
    if (count > kMostEntries)
      return Status(Code::kOutOfRange, fmt::format("{}: {} {}, limit {}", what, count, of, kMostEntries));

  for (uint64_t i = 0; i < pair_count; ++i) {
    LQ_ASSIGN_OR_RETURN(const std::string_view key, in.String("a metadata key"));
    if (key.empty() || key.size() > kMaxKey)
      return Status(Code::kOutOfRange,
                    fmt::format("{}: a metadata key has {} bytes; 1 to {} are allowed", what, key.size(), kMaxKey));
    const std::string of = "metadata " + Excerpt(key);
    LQ_ASSIGN_OR_RETURN(GgufValue value, ReadValue(in, of));
    if (!gguf.metadata_.emplace(key, std::move(value)).second)
      return Status(Code::kInvalidArgument, fmt::format("{}: {} is repeated", what, of));
  }
  if (const GgufValue* split = gguf.Find("split.count")) {
    const uint64_t* parts = std::get_if<uint64_t>(&split->value);
    if (parts == nullptr || *parts > 1)
      return Status(Code::kUnsupported,
                    fmt::format("{}: metadata \"split.count\" is {}; a file that is split is not read: merge it first",
                                what, parts == nullptr ? "no count" : fmt::format("{}", *parts)));
  }
  if (const GgufValue* alignment = gguf.Find("general.alignment")) {
    const uint64_t* bytes = std::get_if<uint64_t>(&alignment->value);
    if (alignment->type != GgufType::kU32 || bytes == nullptr || *bytes == 0 || *bytes % 8 != 0 ||
        *bytes > kMostAlignment)
      return Status(
          Code::kInvalidArgument,
          fmt::format("{}: metadata \"general.alignment\" is {}; a u32 that is a multiple of 8, at most {}, is "
                      "needed",
                      what, bytes == nullptr ? "no unsigned number" : fmt::format("{}", *bytes), kMostAlignment));
    gguf.alignment_ = *bytes;
  }

  if (tensor_count > in.left() / kLeastTensor)
    return Status(Code::kDataLoss, fmt::format("{}: {} tensors of {} bytes or more; the file has {} more bytes", what,
                                               tensor_count, kLeastTensor, in.left()));
  std::vector<Place> places;
  for (uint64_t i = 0; i < tensor_count; ++i) LQ_RETURN_IF_ERROR(ReadTensorInfo(in, &places.emplace_back()));
  if (places.empty()) return gguf;

  const auto padded = [&](uint64_t n) { return (n + gguf.alignment_ - 1) / gguf.alignment_ * gguf.alignment_; };
  const uint64_t data_start = padded(in.at());
  const uint64_t data_bytes = data_start > file.size() ? 0 : file.size() - data_start;
  uint64_t next = 0, end = 0;
  for (Place& p : places) {
    const std::string of = "tensor " + Excerpt(p.name);
    if (p.offset != next)
      return Status(Code::kInvalidArgument,
                    fmt::format("{}: {} lies at offset {}; behind the tensor before it, aligned to {}, is {}", what, of,
                                p.offset, gguf.alignment_, next));
    if (p.bytes > data_bytes || p.offset > data_bytes - p.bytes)
      return Status(Code::kDataLoss,
                    fmt::format("{}: {} of shape [{}] takes {} bytes at offset {}; the file has {} bytes of tensors",
                                what, of, fmt::join(p.tensor.shape, ", "), p.bytes, p.offset, data_bytes));
    p.tensor.bytes = file.subspan(data_start + p.offset, p.bytes);
    end = p.offset + p.bytes;
    next = padded(end);
    if (!gguf.tensors_.emplace(p.name, std::move(p.tensor)).second)
      return Status(Code::kInvalidArgument, fmt::format("{}: {} is repeated", what, of));
  }
  if (data_bytes > next)
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: {} bytes behind the last tensor, which ends at {}", what, data_bytes - next, end));
  return gguf;
}

}  // namespace livequant
