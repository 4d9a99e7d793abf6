// text/unigram.cc: a trie in one hash table, and the best path through a piece.
#include "text/unigram.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "io/json.h"
#include "text/utf8.h"

namespace livequant {
namespace {

constexpr double kUnkPenalty = 10;

// Where the search for an edge begins in a table of 2^k. One multiplication, for encoding is little else; keys differ
// in their low bits, which it carries to the top.
size_t FirstSlot(uint64_t key, size_t slots) { return (key * 0x9E3779B97F4A7C15u) >> (64 - std::countr_zero(slots)); }

}  // namespace

uint32_t UnigramModel::Child(uint32_t node, unsigned char byte) const {
  const uint64_t key = (uint64_t{node} << 8 | byte) + 1;
  size_t i = FirstSlot(key, edges_.size());
  while (edges_[i].key != 0 && edges_[i].key != key) i = (i + 1) & (edges_.size() - 1);
  return edges_[i].key == 0 ? kNoNode : edges_[i].node;
}

uint32_t UnigramModel::AddChild(uint32_t node, unsigned char byte) {
  if (const uint32_t known = Child(node, byte); known != kNoNode) return known;
  if (2 * (node_id_.size() + 1) > edges_.size()) Grow();
  const uint64_t key = (uint64_t{node} << 8 | byte) + 1;
  size_t i = FirstSlot(key, edges_.size());
  while (edges_[i].key != 0) i = (i + 1) & (edges_.size() - 1);
  edges_[i] = {key, static_cast<uint32_t>(node_id_.size())};
  node_id_.push_back(-1);
  return edges_[i].node;
}

void UnigramModel::Grow() {
  std::vector<Edge> old(edges_.size() * 2);
  old.swap(edges_);
  for (const Edge& edge : old) {
    if (edge.key == 0) continue;
    size_t i = FirstSlot(edge.key, edges_.size());
    while (edges_[i].key != 0) i = (i + 1) & (edges_.size() - 1);
    edges_[i] = edge;
  }
}

Result<UnigramModel> UnigramModel::Build(const std::vector<std::pair<std::string, double>>& tokens, int32_t unk,
                                         bool byte_fallback) {
  UnigramModel model;
  if (unk < -1 || unk >= static_cast<int64_t>(tokens.size()))
    return Status(Code::kInvalidArgument, fmt::format("unk_id {} of {} tokens", unk, tokens.size()));
  model.edges_.assign(16, {0, 0});
  model.node_id_.assign(1, -1);
  model.byte_id_.fill(-1);
  model.unk_ = unk;
  model.byte_fallback_ = byte_fallback;
  double lowest = tokens.empty() ? 0 : std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto& [text, score] = tokens[i];
    const auto id = static_cast<int32_t>(i);
    if (text.empty()) return Status(Code::kInvalidArgument, fmt::format("vocab[{}]: an empty token", i));
    if (text.size() > kMaxTokenBytes)
      return Status(Code::kOutOfRange,
                    fmt::format("vocab[{}]: a token of {} bytes, limit {}", i, text.size(), kMaxTokenBytes));
    if (!model.ids_.emplace(text, id).second)
      return Status(Code::kInvalidArgument, fmt::format("vocab[{}]: {} is there twice", i, Excerpt(text)));
    uint32_t node = 0;
    for (const char c : text) node = model.AddChild(node, static_cast<unsigned char>(c));
    model.node_id_[node] = id;
    model.scores_.push_back(score);
    lowest = std::min(lowest, score);
  }
  for (size_t byte = 0; byte < 256; ++byte) {
    const auto fallback = model.ids_.find(fmt::format("<0x{:02X}>", byte));
    if (fallback != model.ids_.end()) model.byte_id_[byte] = fallback->second;
  }
  model.unk_score_ = lowest - kUnkPenalty;
  return model;
}

Status UnigramModel::Encode(std::string_view piece, std::vector<Best>* scratch, std::vector<int32_t>* ids) const {
  if (piece.size() >= static_cast<size_t>(std::numeric_limits<int32_t>::max()))
    return Status(Code::kOutOfRange, fmt::format("a piece of {} bytes", piece.size()));
  std::vector<Best>& best = *scratch;
  best.assign(piece.size() + 1, {0, 0, -2});
  for (size_t at = 0; at < piece.size();) {
    const double here = best[at].score;
    const auto character = static_cast<size_t>(NextUtf8(piece.substr(at)).bytes);
    const auto offer = [&](size_t end, double score, int32_t id) {
      if (best[end].id == -2 || score > best[end].score) best[end] = {score, static_cast<uint32_t>(at), id};
    };
    bool single = false;
    uint32_t node = 0;
    for (size_t end = at; end < piece.size();) {
      node = Child(node, static_cast<unsigned char>(piece[end++]));
      if (node == kNoNode) break;
      if (const int32_t id = node_id_[node]; id >= 0) {
        offer(end, here + scores_[static_cast<size_t>(id)], id);
        single = single || end - at == character;
      }
    }
    if (!single) {
      if (unk_ < 0)
        return Status(Code::kUnsupported, fmt::format("tokenizer.json: no token for character U+{:04X}",
                                                      static_cast<uint32_t>(NextUtf8(piece.substr(at)).code_point)));
      offer(at + character, here + unk_score_, -1);
    }
    at += character;
  }
  // Backwards along the path; runs of unk are joined, and what they spell may be a token after all.
  const size_t before = ids->size();
  for (size_t end = piece.size(); end > 0;) {
    size_t begin = best[end].begin;
    int32_t id = best[end].id;
    if (id == -1 || id == unk_) {
      while (begin > 0 && (best[begin].id == -1 || best[begin].id == unk_)) begin = best[begin].begin;
      const std::string_view run = piece.substr(begin, end - begin);
      const auto whole = ids_.find(run);
      id = whole == ids_.end() ? unk_ : whole->second;
      if (whole == ids_.end() && byte_fallback_ &&
          std::all_of(run.begin(), run.end(), [&](char b) { return byte_id_[static_cast<unsigned char>(b)] >= 0; })) {
        for (size_t i = run.size(); i-- > 1;) ids->push_back(byte_id_[static_cast<unsigned char>(run[i])]);
        id = byte_id_[static_cast<unsigned char>(run[0])];
      }
    }
    ids->push_back(id);
    end = begin;
  }
  std::reverse(ids->begin() + static_cast<int64_t>(before), ids->end());
  return {};
}

}  // namespace livequant
