// io/safetensors.cc: 8 bytes of header length, a JSON header, then the tensors' bytes without a gap.
#include "io/safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "io/json.h"

namespace livequant {
namespace {

using nlohmann::json;

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = uint64_t{100} << 20;
constexpr int64_t kMaxIndexBytes = int64_t{100} << 20;

struct Dtype {
  std::string_view name;
  int bits;
};
constexpr Dtype kDtypes[] = {{"BOOL", 8},        {"U8", 8},          {"I8", 8},      {"F8_E4M3", 8}, {"F8_E5M2", 8},
                             {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"F8_E8M0", 8}, {"F4", 4},      {"F6_E2M3", 6},
                             {"F6_E3M2", 6},     {"I16", 16},        {"U16", 16},    {"F16", 16},    {"BF16", 16},
                             {"I32", 32},        {"U32", 32},        {"F32", 32},    {"I64", 64},    {"U64", 64},
                             {"F64", 64},        {"C64", 64}};

struct Extent {
  uint64_t begin, end;
  const std::string* name;
};

// The entry of one tensor without its bytes, and where they lie behind the header.
Status ParseTensor(const std::string& where, const json& entry, TensorInfo* info, Extent* extent) {
  if (!entry.is_object())
    return Status(Code::kInvalidArgument, fmt::format("{}: {}, not an object", where, entry.type_name()));
  for (const auto& [key, value] : entry.items()) {
    if (key != "dtype" && key != "shape" && key != "data_offsets")
      return Status(Code::kInvalidArgument, fmt::format("{}: unknown field {}", where, Excerpt(key)));
  }
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!entry.contains(key)) return Status(Code::kInvalidArgument, fmt::format("{}: no {}", where, key));
  }

  const json& dtype = entry["dtype"];
  if (!dtype.is_string()) return Status(Code::kInvalidArgument, fmt::format("{}: dtype is no string", where));
  info->dtype = dtype.get_ref<const std::string&>();
  const Dtype* known =
      std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](const Dtype& d) { return d.name == info->dtype; });
  if (known == std::end(kDtypes))
    return Status(Code::kUnsupported, fmt::format("{}: dtype {} is unknown", where, Excerpt(info->dtype)));

  const json& shape = entry["shape"];
  if (!shape.is_array()) return Status(Code::kInvalidArgument, fmt::format("{}: shape is no array", where));
  // Zeros are left out of the bound, so that no product over some of the dimensions can overflow later.
  int64_t bits = known->bits;
  bool empty = false;
  for (const json& n : shape) {
    if (!n.is_number_unsigned())
      return Status(Code::kInvalidArgument,
                    fmt::format("{}: shape holds {}, not a count", where, Excerpt(n.dump(-1, ' ', true), 32)));
    const uint64_t count = n.get<uint64_t>();
    empty = empty || count == 0;
    if (count > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) ||
        (count != 0 && __builtin_mul_overflow(bits, static_cast<int64_t>(count), &bits)))
      return Status(Code::kOutOfRange, fmt::format("{}: a shape with {} needs 2^63 bits or more", where, count));
    info->shape.push_back(static_cast<int64_t>(count));
  }
  if (empty) bits = 0;
  if (bits % 8 != 0)
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: {} bits of {} are no whole number of bytes", where, bits, info->dtype));

  const json& offsets = entry["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
      !offsets[1].is_number_unsigned())
    return Status(Code::kInvalidArgument, fmt::format("{}: data_offsets are not two byte counts", where));
  extent->begin = offsets[0].get<uint64_t>();
  extent->end = offsets[1].get<uint64_t>();
  if (extent->begin > extent->end)
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: data_offsets run from {} back to {}", where, extent->begin, extent->end));
  if (extent->end - extent->begin != static_cast<uint64_t>(bits) / 8)
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: data_offsets span {} bytes, shape [{}] of {} needs {}", where,
                              extent->end - extent->begin, fmt::join(info->shape, ","), info->dtype, bits / 8));
  return {};
}

// A shard lies beside its index: any name that could lead elsewhere is refused, and so is one that is not printable
// ASCII, for messages name shards.
Status CheckShardName(const std::string& where, const std::string& name) {
  const bool plain = name.ends_with(".safetensors") && name.front() != '.' && name.size() <= 255 &&
                     std::all_of(name.begin(), name.end(), [](char c) { return c >= 0x20 && c < 0x7F; }) &&
                     name.find_first_of("/\\") == name.npos;
  if (plain) return {};
  return Status(Code::kInvalidArgument, fmt::format("{}: {} is no file name of a shard", where, Excerpt(name)));
}

// metadata.total_size of an index is the bytes of all tensors; some writers give it as a fraction of .0.
Status CheckTotalSize(const std::string& index, const json& document,
                      const std::map<std::string, TensorInfo>& tensors) {
  if (!document.contains("metadata")) return {};
  const json& metadata = document["metadata"];
  if (!metadata.is_object())
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: metadata is {}, not an object", index, ExcerptOfValue(metadata)));
  if (!metadata.contains("total_size")) return {};
  uint64_t bytes = 0;
  for (const auto& [name, t] : tensors) bytes += t.bytes.size();
  const json& total = metadata["total_size"];
  const bool equal = total.is_number_unsigned()
                         ? total.get<uint64_t>() == bytes
                         : total.is_number() && total.get<double>() == static_cast<double>(bytes);
  if (equal) return {};
  return Status(Code::kInvalidArgument, fmt::format("{}: metadata.total_size is {}; its {} tensors have {} bytes",
                                                    index, ExcerptOfValue(total), tensors.size(), bytes));
}

}  // namespace

Result<std::map<std::string, TensorInfo>> Safetensors::ParseHeader(std::span<const std::byte> file,
                                                                   std::string_view what,
                                                                   std::map<std::string, std::string>* metadata) {
  if (file.size() < kLengthBytes)
    return Status(Code::kDataLoss,
                  fmt::format("{}: {} bytes, the header length alone takes {}", what, file.size(), kLengthBytes));
  uint64_t header_bytes = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) header_bytes |= std::to_integer<uint64_t>(file[i]) << (8 * i);
  if (header_bytes > kMaxHeaderBytes)
    return Status(Code::kOutOfRange,
                  fmt::format("{}: header of {} bytes, limit {}", what, header_bytes, kMaxHeaderBytes));
  if (header_bytes > file.size() - kLengthBytes)
    return Status(Code::kDataLoss, fmt::format("{}: header of {} bytes, the file has {} behind its length", what,
                                               header_bytes, file.size() - kLengthBytes));
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + kLengthBytes, header_bytes);
  if (!text.starts_with('{'))
    return Status(Code::kInvalidArgument, fmt::format("{}: the header does not start with '{{'", what));
  LQ_ASSIGN_OR_RETURN(const json header, ParseJson(text, fmt::format("{} header", what), {.max_depth = 8}));

  const std::span<const std::byte> data = file.subspan(kLengthBytes + header_bytes);
  std::map<std::string, TensorInfo> tensors;
  std::vector<Extent> extents;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      const bool strings = entry.is_object() &&
                           std::all_of(entry.begin(), entry.end(), [](const json& value) { return value.is_string(); });
      if (!strings)
        return Status(Code::kInvalidArgument, fmt::format("{}: __metadata__ is no object of strings", what));
      if (metadata != nullptr) *metadata = entry.get<std::map<std::string, std::string>>();
      continue;
    }
    const auto place = tensors.try_emplace(name).first;
    Extent extent{0, 0, &place->first};
    LQ_RETURN_IF_ERROR(ParseTensor(fmt::format("{}: tensor {}", what, Excerpt(name)), entry, &place->second, &extent));
    if (extent.end > data.size())
      return Status(Code::kDataLoss, fmt::format("{}: tensor {} ends at byte {}, the file has {} of data", what,
                                                 Excerpt(name), extent.end, data.size()));
    place->second.bytes = data.subspan(extent.begin, extent.end - extent.begin);
    extents.push_back(extent);
  }

  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  uint64_t covered = 0;
  for (const Extent& e : extents) {
    if (e.begin != covered)
      return Status(
          Code::kInvalidArgument,
          fmt::format("{}: tensor {} starts at byte {}, {} the one before it, which ends at {}", what, Excerpt(*e.name),
                      e.begin, e.begin < covered ? "inside" : "with a hole behind", covered));
    covered = e.end;
  }
  if (covered != data.size())
    return Status(Code::kInvalidArgument, fmt::format("{}: {} bytes behind the last tensor, which ends at {}", what,
                                                      data.size() - covered, covered));
  return tensors;
}

Result<Safetensors> Safetensors::OpenFile(const std::string& path) {
  Safetensors model;
  LQ_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path));
  LQ_ASSIGN_OR_RETURN(model.tensors_, ParseHeader(file.bytes(), path, &model.metadata_));
  model.files_.push_back(std::move(file));
  model.paths_.push_back(path);
  return model;
}

Result<Safetensors> Safetensors::OpenDirectory(const std::string& directory) {
  const std::string single = directory + "/model.safetensors", index = directory + "/model.safetensors.index.json";
  Result<Safetensors> whole = OpenFile(single);
  if (whole.ok() || whole.status().code() != Code::kNotFound) return whole;

  Safetensors model;
  Result<std::string> text = ReadFile(index, kMaxIndexBytes);
  if (!text.ok() && text.status().code() == Code::kNotFound)
    return Status(Code::kNotFound,
                  fmt::format("{}: neither model.safetensors nor model.safetensors.index.json", directory));
  if (!text.ok()) return text.status();
  LQ_ASSIGN_OR_RETURN(const json document, ParseJson(*text, index));
  if (!document.is_object() || !document.contains("weight_map") || !document["weight_map"].is_object())
    return Status(Code::kInvalidArgument, fmt::format("{}: no object weight_map", index));
  for (const auto& [key, value] : document.items())
    if (key != "weight_map" && key != "metadata")
      return Status(Code::kInvalidArgument, fmt::format("{}: unknown field {}", index, Excerpt(key)));
  const json& weight_map = document["weight_map"];
  std::set<std::string> shards;
  for (const auto& [name, shard] : weight_map.items()) {
    const std::string where = fmt::format("{}: tensor {}", index, Excerpt(name));
    if (!shard.is_string()) return Status(Code::kInvalidArgument, fmt::format("{}: its shard is no string", where));
    LQ_RETURN_IF_ERROR(CheckShardName(where, shard.get_ref<const std::string&>()));
    shards.insert(shard.get<std::string>());
  }
  for (const std::string& shard : shards) {
    const std::string path = directory + "/" + shard;
    LQ_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path));
    LQ_ASSIGN_OR_RETURN(auto tensors, ParseHeader(file.bytes(), path));
    for (auto& [name, info] : tensors) {
      const auto listed = weight_map.find(name);
      if (listed == weight_map.end())
        return Status(Code::kInvalidArgument,
                      fmt::format("{}: tensor {} is not listed in the index", path, Excerpt(name)));
      if (*listed != shard)
        return Status(Code::kInvalidArgument,
                      fmt::format("{}: tensor {} belongs to {} by the index", path, Excerpt(name),
                                  Excerpt(listed->get_ref<const std::string&>())));
      model.tensors_.emplace(name, std::move(info));
    }
    model.files_.push_back(std::move(file));
    model.paths_.push_back(path);
  }
  for (const auto& [name, shard] : weight_map.items()) {
    if (!model.tensors_.contains(name))
      return Status(Code::kInvalidArgument, fmt::format("{}: tensor {} is not in {}", index, Excerpt(name),
                                                        Excerpt(shard.get_ref<const std::string&>())));
  }
  LQ_RETURN_IF_ERROR(CheckTotalSize(index, document, model.tensors_));
  return model;
}

std::string SafetensorsText(const std::map<std::string, TensorInfo>& tensors,
                            const std::map<std::string, std::string>& metadata) {
  json header = json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t at = 0;
  for (const auto& [name, t] : tensors) {
    header[name] = {{"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {at, at + t.bytes.size()}}};
    at += t.bytes.size();
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  std::string out;
  out.reserve(kLengthBytes + text.size() + at);
  for (size_t i = 0; i < kLengthBytes; ++i) out += static_cast<char>(uint64_t{text.size()} >> (8 * i));
  out += text;
  for (const auto& [name, t] : tensors) out.append(reinterpret_cast<const char*>(t.bytes.data()), t.bytes.size());
  return out;
}

}  // namespace livequant
