// base/status.h: errors are values. A Status names the thing, the value seen and the limit; bugs abort (base/check.h).
#pragma once

#include <string>
#include <utility>
#include <variant>

#include "base/check.h"

namespace livequant {

// One code per way a caller can react, not per place that fails.
enum class Code {
  kOk,
  kInvalidArgument,  // malformed input or call: fix the call
  kNotFound,         // a named thing does not exist
  kUnsupported,      // well-formed, but no implementation; the message says which and what is nearest
  kOutOfRange,       // a value beyond a stated limit
  kNonFinite,        // NaN or Inf among rows to be cached
  kOutOfPages,       // a fixed pool cannot hold the request; nothing was taken
  kStale,            // the sequence moved on since the transaction began
  kClosed,           // the sequence was released
  kDuplicateLayer,   // a layer was prepared twice
  kMissingLayer,     // publish before every layer was prepared
  kFailedTxn,        // the transaction already failed; begin a fresh one
  kDataLoss,         // truncated or corrupt bytes
  kIo,               // the operating system refused
  kCancelled,
  kAccepted,    // a transaction of this id was accepted before: its receipt stands, nothing was done again
  kIdMismatch,  // an id that stands for something else
  kIdExpired,   // an id so old that nobody knows what it stood for
};

// Stable lower-case name of a code, as JSON output shows it: "out_of_pages".
const char* CodeName(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) { LQ_CHECK(code != Code::kOk); }
  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }
  // "out_of_pages: ..." for people.
  std::string ToString() const;

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// A value, or why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : v_(std::in_place_index<0>, std::move(value)) {}
  Result(Status why) : v_(std::in_place_index<1>, std::move(why)) { LQ_CHECK(!std::get<1>(v_).ok()); }
  bool ok() const { return v_.index() == 0; }
  const Status& status() const {
    static const Status kFine;
    return ok() ? kFine : std::get<1>(v_);
  }
  T& operator*() & {
    LQ_CHECK(ok());
    return std::get<0>(v_);
  }
  const T& operator*() const& {
    LQ_CHECK(ok());
    return std::get<0>(v_);
  }
  T&& operator*() && {
    LQ_CHECK(ok());
    return std::get<0>(std::move(v_));
  }
  T* operator->() { return &**this; }
  const T* operator->() const { return &**this; }

 private:
  std::variant<T, Status> v_;
};

}  // namespace livequant

// Returns the Status of `expr` from the current function if it is an error.
#define LQ_RETURN_IF_ERROR(expr)                                                      \
  do {                                                                                \
    if (::livequant::Status lq_status_ = (expr); !lq_status_.ok()) return lq_status_; \
  } while (false)

#define LQ_CONCAT_INNER(a, b) a##b
#define LQ_CONCAT(a, b) LQ_CONCAT_INNER(a, b)
// LQ_ASSIGN_OR_RETURN(auto x, Parse(text)): x, or the error is returned.
#define LQ_ASSIGN_OR_RETURN(lhs, expr) LQ_ASSIGN_OR_RETURN_INNER(LQ_CONCAT(lq_result_, __LINE__), lhs, expr)
#define LQ_ASSIGN_OR_RETURN_INNER(tmp, lhs, expr) \
  auto tmp = (expr);                              \
  if (!tmp.ok()) return tmp.status();             \
  lhs = *std::move(tmp)
