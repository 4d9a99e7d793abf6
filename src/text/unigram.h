// text/unigram.h: a unigram language model: of all ways to cut a piece into tokens, the one with the largest sum of
// scores.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "text/bpe.h"

namespace livequant {

// Tokens with their scores, ids in order. Immutable once built.
class UnigramModel {
 public:
  // The search costs up to this many steps a character.
  static constexpr size_t kMaxTokenBytes = 128;

  // kInvalidArgument: a token is there twice or empty; unk outside the list. kOutOfRange: a token above the limit.
  // `unk` -1: none. byte_fallback: a run without tokens is its <0x..> bytes, if all of them are tokens.
  static Result<UnigramModel> Build(const std::vector<std::pair<std::string, double>>& tokens, int32_t unk,
                                    bool byte_fallback);

  // Appends the ids of a piece (UTF-8) by Viterbi's algorithm, linear in its length. A character that is no token costs
  // 10 more than the lowest score; a run of them is one unk. kUnsupported: there is one, and no unk. `scratch` is kept
  // between calls. Source: google/sentencepiece (unigram_model.cc), with its order of ties.
  struct Best {
    double score;
    uint32_t begin;
    int32_t id;  // -2: not reached; -1: unk
  };
  Status Encode(std::string_view piece, std::vector<Best>* scratch, std::vector<int32_t>* ids) const;

  int32_t size() const { return static_cast<int32_t>(scores_.size()); }

 private:
  static constexpr uint32_t kNoNode = ~uint32_t{0};
  struct Edge {
    uint64_t key;  // node << 8 | byte, plus 1; 0: empty
    uint32_t node;
  };
  uint32_t Child(uint32_t node, unsigned char byte) const;
  uint32_t AddChild(uint32_t node, unsigned char byte);
  void Grow();

  std::vector<double> scores_;
  StringToId ids_;
  std::vector<Edge> edges_;       // of the trie, open addressing
  std::vector<int32_t> node_id_;  // the token that ends at a node, or -1
  std::array<int32_t, 256> byte_id_;
  double unk_score_ = 0;
  int32_t unk_ = -1;
  bool byte_fallback_ = false;
};

}  // namespace livequant
