// text/decoder.cc: the steps of huggingface/tokenizers' decoders on one token at a time.
#include "text/decoder.h"

#include <fmt/format.h>

#include "text/characters.h"
#include "text/find.h"
#include "text/utf8.h"

namespace livequant {
namespace {

constexpr size_t kMaxTokenText = size_t{1} << 20;

Result<std::string> Replaced(const DecoderSteps::Step& step, std::string_view token) {
  std::string out;
  size_t done = 0;
  const auto put = [&](size_t begin, size_t end) {
    out.append(token.substr(done, begin - done)).append(step.to);
    done = end;
  };
  if (!step.pattern.empty()) {
    Regex::Scanner scanner(step.pattern[0]);
    scanner.Start(token);
    for (size_t begin = 0, end = 0;;) {
      LQ_ASSIGN_OR_RETURN(const bool found, scanner.Next(&begin, &end));
      if (!found) break;
      put(begin, end);
    }
  } else {
    for (size_t at = 0; (at = FindText(token, step.from, at)) != token.npos; at += step.from.size())
      put(at, at + step.from.size());
  }
  out.append(token.substr(done));
  if (out.size() > kMaxTokenText)
    return Status(Code::kOutOfRange, fmt::format("a token decodes to {} bytes, limit {}", out.size(), kMaxTokenText));
  return out;
}

}  // namespace

Result<std::string> DecoderSteps::Token(std::string_view spelling, bool first) const {
  std::string token(spelling);
  for (const Step& step : steps) {
    switch (step.kind) {
      case Step::kReplace: {
        LQ_ASSIGN_OR_RETURN(token, Replaced(step, token));
        break;
      }
      case Step::kByteFallback:
        // A byte is no text: later steps leave it alone.
        if (const int byte = ByteOfFallback(token); byte >= 0) return std::string(1, static_cast<char>(byte));
        break;
      case Step::kStrip: {
        std::string_view rest = token;
        for (size_t i = 0; i < step.start && rest.starts_with(step.from); ++i) rest.remove_prefix(step.from.size());
        for (size_t i = 0; i < step.stop && rest.ends_with(step.from); ++i) rest.remove_suffix(step.from.size());
        token = std::string(rest);
        break;
      }
      case Step::kByteLevel:
        token = BytesOfSpelling(token).value_or(token);
        break;
      case Step::kMetaspace: {
        std::string out;
        for (size_t at = 0; at < token.size();) {
          if (std::string_view(token).substr(at).starts_with(step.from)) {
            if (!first || !step.first) out += ' ';
            at += step.from.size();
          } else {
            out += token[at++];
          }
        }
        token = std::move(out);
        break;
      }
    }
  }
  return token;
}

void DecodedText::Push(const DecoderSteps& steps, std::string_view bytes, std::string* text) {
  first_ = false;
  while (strip_ > 0 && !bytes.empty()) {
    if (!held_.empty() || !bytes.starts_with(steps.strip_character)) {
      strip_ = 0;
    } else {
      bytes.remove_prefix(steps.strip_character.size());
      --strip_;
    }
  }
  held_ += bytes;
  DrainUtf8(&held_, text);
}

void DecodedText::Finish(std::string* text) {
  if (!held_.empty()) *text += "\xEF\xBF\xBD";
  held_.clear();
}

}  // namespace livequant
