// text/regex.h: the patterns of tokenizer.json, run by PCRE2 with Unicode classes, JIT and a limit on backtracking.
//
// Hugging Face runs them with Oniguruma. Where the two read the same text differently, the pattern is refused or
// rewritten (regex.cc, Translate): no pattern means one thing there and another here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"

namespace livequant {

// A compiled pattern: immutable, shared by threads.
class Regex {
 public:
  // kInvalidArgument: not a pattern (offset and reason). kUnsupported: reads differently in Oniguruma. kOutOfRange:
  // longer than 64 KiB.
  static Result<Regex> Compile(std::string_view pattern);

  // The matches in one subject, in order. One thread at a time.
  class Scanner {
   public:
    explicit Scanner(const Regex& regex);
    ~Scanner();
    Scanner(Scanner&& other) noexcept;
    Scanner(const Scanner&) = delete;
    Scanner& operator=(const Scanner&) = delete;

    // REQUIRES: `subject` is UTF-8 and outlives the scan.
    void Start(std::string_view subject);
    // The next match as [begin, end), or false behind the last one. An empty match where the one before it ended is
    // passed over. kOutOfRange: a backtracking limit was reached, of one match or of all
    Result<bool> Next(size_t* begin, size_t* end);

   private:
    const Regex* regex_;
    struct State;
    std::unique_ptr<State> state_;
  };

 private:
  struct Code;
  std::shared_ptr<const Code> code_;
};

}  // namespace livequant
