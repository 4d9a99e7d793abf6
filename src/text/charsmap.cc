// text/charsmap.cc: base64, and a walk through darts-clone's units.
//
// A unit: bits 0..7 the label, bit 31 set in a leaf (whose lower 31 bits are then the value), bit 8 says that a leaf
// follows, bits 10..30 the offset, shifted by 8 where bit 9 is set.
#include "text/charsmap.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <array>
#include <utility>

#include "text/utf8.h"

namespace livequant {
namespace {

constexpr size_t kMaxReplacedCluster = 6;  // bytes; longer clusters go character by character

Status Bad(std::string_view what) {
  return Status(Code::kInvalidArgument, fmt::format("precompiled_charsmap: {}", what));
}

uint32_t Offset(uint32_t unit) { return (unit >> 10) << ((unit & 0x200) >> 6); }
uint32_t Label(uint32_t unit) { return unit & 0x800000FFu; }
bool HasLeaf(uint32_t unit) { return (unit & 0x100) != 0; }
uint32_t Value(uint32_t unit) { return unit & 0x7FFFFFFFu; }

Result<std::string> DecodeBase64(std::string_view text) {
  static constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::array<int, 256> value{};
  value.fill(-1);
  for (size_t i = 0; i < kAlphabet.size(); ++i) value[static_cast<unsigned char>(kAlphabet[i])] = static_cast<int>(i);
  size_t padding = 0;
  while (padding < 2 && !text.empty() && text.back() == '=') {
    text.remove_suffix(1);
    ++padding;
  }
  if ((text.size() + padding) % 4 != 0 || text.size() % 4 == 1)
    return Bad(fmt::format("{} digits of base64, not a multiple of 4", text.size() + padding));
  std::string out;
  out.reserve(text.size() / 4 * 3 + 2);
  uint32_t bits = 0;
  int held = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const int digit = value[static_cast<unsigned char>(text[i])];
    if (digit < 0) return Bad(fmt::format("no base64 at byte {}", i));
    bits = (bits << 6 | static_cast<uint32_t>(digit)) & 0xFFFFFF;
    if ((held += 6) >= 8) {
      held -= 8;
      out += static_cast<char>(bits >> held & 0xFF);
    }
  }
  return out;
}

}  // namespace

Result<Charsmap> Charsmap::Parse(std::string_view base64) {
  LQ_ASSIGN_OR_RETURN(const std::string bytes, DecodeBase64(base64));
  const auto u32 = [&](size_t at) {
    uint32_t v = 0;
    for (size_t i = 4; i-- > 0;) v = v << 8 | static_cast<unsigned char>(bytes[at + i]);
    return v;
  };
  if (bytes.size() < 4) return Bad(fmt::format("{} bytes, not even a length", bytes.size()));
  const size_t units = u32(0);
  if (units % 4 != 0 || units == 0 || units > bytes.size() - 4)
    return Bad(fmt::format("units of {} bytes in {} bytes", units, bytes.size() - 4));
  Charsmap map;
  map.units_.reserve(units / 4);
  for (size_t i = 0; i < units; i += 4) map.units_.push_back(u32(4 + i));
  map.blob_ = bytes.substr(4 + units);
  if (const size_t at = InvalidUtf8At(map.blob_); at != map.blob_.npos)
    return Bad(fmt::format("replacements are not UTF-8 at byte {}", at));
  return map;
}

Result<bool> Charsmap::Find(std::string_view chunk, std::string_view* value) const {
  size_t at = Offset(units_[0]);
  for (const char c : chunk) {
    if (c == '\0') return false;
    at ^= static_cast<unsigned char>(c);
    if (at >= units_.size()) return Bad(fmt::format("unit {} of {}", at, units_.size()));
    const uint32_t unit = units_[at];
    if (Label(unit) != static_cast<unsigned char>(c)) return false;
    at ^= Offset(unit);
    if (!HasLeaf(unit)) continue;
    if (at >= units_.size()) return Bad(fmt::format("leaf {} of {}", at, units_.size()));
    const size_t begin = Value(units_[at]);
    if (begin >= blob_.size() || (static_cast<unsigned char>(blob_[begin]) & 0xC0) == 0x80)
      return Bad(fmt::format("a replacement at byte {} of {}", begin, blob_.size()));
    *value = std::string_view(blob_).substr(begin, blob_.find('\0', begin) - begin);
    return true;
  }
  return false;
}

Status Charsmap::Apply(std::string_view text, size_t limit, std::string* out) const {
  for (size_t at = 0; at < text.size();) {
    if (out->size() > limit)
      return Status(Code::kOutOfRange, fmt::format("normalizing {} bytes: more than {}", text.size(), limit));
    utf8proc_int32_t state = 0;
    size_t end = at;  // of the cluster
    for (char32_t before = 0; end < text.size();) {
      const Utf8Step step = NextUtf8(text.substr(end));
      if (end > at && utf8proc_grapheme_break_stateful(static_cast<utf8proc_int32_t>(before),
                                                       static_cast<utf8proc_int32_t>(step.code_point), &state))
        break;
      before = step.code_point;
      end += static_cast<size_t>(step.bytes);
    }
    std::string_view value;
    if (end - at < kMaxReplacedCluster) {
      LQ_ASSIGN_OR_RETURN(const bool whole, Find(text.substr(at, end - at), &value));
      if (whole) {
        out->append(value);
        at = end;
        continue;
      }
    }
    while (at < end) {
      const std::string_view character = text.substr(at, static_cast<size_t>(NextUtf8(text.substr(at)).bytes));
      LQ_ASSIGN_OR_RETURN(const bool found, Find(character, &value));
      out->append(found ? value : character);
      at += character.size();
    }
  }
  return {};
}

}  // namespace livequant
