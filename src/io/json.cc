// io/json.cc: nlohmann's parser under a handler that builds the value and refuses what the library would let pass:
// repeated keys, depth, a byte order mark, and everything behind a NUL byte (which it takes for the end).
#include "io/json.h"

#include <fmt/format.h>

#include <cstddef>
#include <iterator>
#include <utility>
#include <vector>

namespace livequant {
namespace {

using nlohmann::json;

// Bytes of the text, with the place of the parser visible to the handler.
struct CountingCursor {
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  const char* at;
  const char** seen;  // one past the last byte that the parser took; null for the end

  reference operator*() const { return *at; }
  CountingCursor& operator++() {
    *seen = ++at;
    return *this;
  }
  bool operator==(const CountingCursor& other) const { return at == other.at; }
  bool operator!=(const CountingCursor& other) const { return at != other.at; }
};

// Invariant: open_ holds the objects and arrays around the next value, outermost first. A pointer in it stays good: a
// container does not grow while a child of it is open.
class Builder {
 public:
  Builder(const char* begin, const char* const* seen, std::string_view what, const JsonLimits& limits)
      : begin_(begin), seen_(seen), what_(what), limits_(limits) {}

  bool null() { return Value(nullptr); }
  bool boolean(bool v) { return Value(v); }
  bool number_integer(json::number_integer_t v) { return Value(v); }
  bool number_unsigned(json::number_unsigned_t v) { return Value(v); }
  bool number_float(json::number_float_t v, const json::string_t&) { return Value(v); }
  bool string(json::string_t& v) { return Value(std::move(v)); }
  bool binary(json::binary_t&) { return false; }  // not a JSON text value
  bool start_object(size_t) { return Open(json::value_t::object); }
  bool start_array(size_t) { return Open(json::value_t::array); }
  bool end_object() { return Close(); }
  bool end_array() { return Close(); }
  bool key(json::string_t& name) {
    auto& object = open_.back()->get_ref<json::object_t&>();
    const auto [place, fresh] = object.emplace(name, nullptr);
    if (!fresh) return Refuse(Code::kInvalidArgument, fmt::format("key {} is repeated in one object", Excerpt(name)));
    slot_ = &place->second;
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) {
    std::string_view why =
        error.what();  // "[json.exception...] parse error at line 1, column 2: WHY; last read: 'TEXT'"
    if (const size_t i = why.find(": "); i != why.npos) why.remove_prefix(i + 2);
    why = why.substr(0, why.find("; last read"));
    if (error.id / 100 == 4) why = "a number beyond the range of a double";
    // The library counts the byte at which it gave up; where the text ended, that is one past it.
    status_ =
        Status(Code::kInvalidArgument, fmt::format("{}: {} at byte {}", what_, why, position == 0 ? 0 : position - 1));
    return false;
  }

  const Status& status() const { return status_; }
  json Take() { return std::move(root_); }

 private:
  template <class T>
  bool Value(T&& v) {
    return Place(json(std::forward<T>(v))) != nullptr;
  }
  bool Open(json::value_t kind) {
    if (static_cast<int64_t>(open_.size()) >= limits_.max_depth)
      return Refuse(Code::kOutOfRange, fmt::format("nesting deeper than {}", limits_.max_depth));
    json* made = Place(json(kind));
    if (made == nullptr) return false;
    open_.push_back(made);
    return true;
  }
  bool Close() {
    open_.pop_back();
    return true;
  }
  json* Place(json v) {
    if (++values_ > limits_.max_values) {
      Refuse(Code::kOutOfRange, fmt::format("more than {} values", limits_.max_values));
      return nullptr;
    }
    if (open_.empty()) {
      root_ = std::move(v);
      return &root_;
    }
    if (open_.back()->is_array()) {
      auto& array = open_.back()->get_ref<json::array_t&>();
      array.push_back(std::move(v));
      return &array.back();
    }
    *slot_ = std::move(v);
    return slot_;
  }
  bool Refuse(Code code, const std::string& why) {
    status_ = Status(code, fmt::format("{}: {} at byte {}", what_, why, *seen_ - begin_));
    return false;
  }

  const char* begin_;
  const char* const* seen_;
  std::string_view what_;
  const JsonLimits& limits_;
  json root_;
  std::vector<json*> open_;
  json* slot_ = nullptr;
  int64_t values_ = 0;
  Status status_;
};

}  // namespace

Result<json> ParseJson(std::string_view text, std::string_view what, const JsonLimits& limits) {
  if (static_cast<int64_t>(text.size()) > limits.max_bytes)
    return Status(Code::kOutOfRange,
                  fmt::format("{}: {} bytes of JSON, limit {}", what, text.size(), limits.max_bytes));
  if (text.starts_with("\xEF\xBB\xBF"))
    return Status(Code::kInvalidArgument, fmt::format("{}: a byte order mark at byte 0", what));
  if (const size_t nul = text.find('\0'); nul != text.npos)
    return Status(Code::kInvalidArgument, fmt::format("{}: a NUL byte at byte {}", what, nul));
  const char* const begin = text.data();
  const char* seen = begin;
  Builder builder(begin, &seen, what, limits);
  if (!json::sax_parse(CountingCursor{begin, &seen}, CountingCursor{begin + text.size(), nullptr}, &builder))
    return builder.status();
  return builder.Take();
}

std::string Excerpt(std::string_view text, size_t max_bytes) {
  std::string out = "\"";
  for (const char c : text.substr(0, max_bytes)) {
    if (c >= 0x20 && c < 0x7F) {
      out += c;
    } else {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    }
  }
  out += text.size() > max_bytes ? "...\"" : "\"";
  return out;
}

std::string ExcerptOfKey(std::string_view key, size_t max_bytes) {
  const std::string quoted = Excerpt(key, max_bytes);
  return quoted.substr(1, quoted.size() - 2);
}

std::string ExcerptOfValue(const json& value, size_t max_bytes) {
  const std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  return text.size() <= max_bytes ? text : text.substr(0, max_bytes) + "...";
}

}  // namespace livequant
