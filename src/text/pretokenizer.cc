// text/pretokenizer.cc: every cut is a list of parts, matches and what lies between them, folded as its behaviour says.
#include "text/pretokenizer.h"

#include <algorithm>

#include "text/find.h"
#include "text/utf8.h"

namespace livequant {
namespace {

// Replaces each U+0020 of `piece` by `space`.
void ReplaceSpaces(std::string_view piece, std::string_view space, std::string* out) {
  for (const char c : piece) {
    if (c == ' ') {
      out->append(space);
    } else {
      *out += c;
    }
  }
}

}  // namespace

PreTokenizer::PreTokenizer(const std::vector<PreTokenizerStep>& steps) : steps_(steps), scratch_(steps.size()) {
  for (size_t i = 0; i < steps.size(); ++i)
    if (const Regex* regex = std::get_if<Regex>(&steps[i].pattern)) scratch_[i].scanner.emplace(*regex);
}

Status PreTokenizer::Find(size_t index, std::string_view piece, std::vector<Part>* parts) {
  const PreTokenizerStep& step = steps_[index];
  parts->clear();
  size_t done = 0;
  const auto match = [&](size_t begin, size_t end) {
    if (begin > done) parts->push_back({done, begin, step.invert});
    parts->push_back({begin, end, !step.invert});
    done = end;
  };
  if (scratch_[index].scanner) {
    Regex::Scanner& scanner = *scratch_[index].scanner;
    scanner.Start(piece);
    for (size_t begin = 0, end = 0;;) {
      LQ_ASSIGN_OR_RETURN(const bool found, scanner.Next(&begin, &end));
      if (!found) break;
      match(begin, end);
    }
  } else if (const auto* literal = std::get_if<std::string>(&step.pattern)) {
    for (size_t at = 0; (at = FindText(piece, *literal, at)) != piece.npos; at += literal->size())
      match(at, at + literal->size());
  } else {
    const auto is = std::get<PreTokenizerStep::Predicate>(step.pattern);
    for (size_t at = 0; at < piece.size();) {
      const Utf8Step c = NextUtf8(piece.substr(at));
      if (is(c.code_point)) match(at, at + static_cast<size_t>(c.bytes));
      at += static_cast<size_t>(c.bytes);
    }
  }
  if (done < piece.size()) parts->push_back({done, piece.size(), step.invert});
  return {};
}

Status PreTokenizer::Step(size_t index, std::string_view piece, bool first, Sink& sink) {
  if (index == steps_.size()) return sink.Piece(piece);
  const PreTokenizerStep& step = steps_[index];
  Scratch& scratch = scratch_[index];
  const bool prefix = step.when == PreTokenizerStep::kAlways || (step.when == PreTokenizerStep::kFirst && first);
  if (!step.space.empty() || prefix) {
    scratch.edited.clear();
    if (prefix && !piece.starts_with(step.prefix) && !(!step.space.empty() && piece.starts_with(' ')))
      scratch.edited = step.prefix;
    if (step.space.empty()) {
      scratch.edited.append(piece);
    } else {
      ReplaceSpaces(piece, step.space, &scratch.edited);
    }
    piece = scratch.edited;
  }
  if (std::holds_alternative<std::monostate>(step.pattern)) return Step(index + 1, piece, first, sink);
  std::vector<Part>& parts = scratch.parts;
  LQ_RETURN_IF_ERROR(Find(index, piece, &parts));
  const auto next = [&](size_t begin, size_t end) -> Status {
    if (begin == end) return {};
    return Step(index + 1, piece.substr(begin, end - begin), first && begin == 0, sink);
  };
  // Joins runs of parts in place, so that each is one piece: `joins(i)` says that part i belongs to the one before.
  const auto join = [&](auto&& joins) -> Status {
    for (size_t i = 0; i < parts.size();) {
      size_t end = i + 1;
      while (end < parts.size() && joins(end)) ++end;
      LQ_RETURN_IF_ERROR(next(parts[i].begin, parts[end - 1].end));
      i = end;
    }
    return {};
  };
  switch (step.behavior) {
    case SplitBehavior::kRemoved:
      for (const Part& part : parts)
        if (!part.match) LQ_RETURN_IF_ERROR(next(part.begin, part.end));
      return {};
    case SplitBehavior::kIsolated:
      for (const Part& part : parts) LQ_RETURN_IF_ERROR(next(part.begin, part.end));
      return {};
    case SplitBehavior::kMergedWithPrevious:
      return join([&](size_t i) { return parts[i].match && !parts[i - 1].match; });
    case SplitBehavior::kMergedWithNext:
      return join([&](size_t i) { return parts[i - 1].match && !parts[i].match; });
    case SplitBehavior::kContiguous:
      return join([&](size_t i) { return parts[i].match == parts[i - 1].match; });
  }
  LQ_CHECK(false);
  return {};
}

}  // namespace livequant
