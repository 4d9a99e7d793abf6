// text/bpe.h: byte-pair encoding of one piece: symbols, then the pair of the lowest rank merged over and over, of
// several such pairs the leftmost.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "base/status.h"

namespace livequant {

struct StringHash {  // lets a map of strings be searched by a view
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
using StringToId = std::unordered_map<std::string, int32_t, StringHash, std::equal_to<>>;

// (left, right) -> rank and result, open addressing.
class MergeTable {
 public:
  static constexpr uint32_t kNone = ~uint32_t{0};
  struct Merge {
    uint32_t rank;  // kNone: the pair is not merged
    int32_t result;
  };

  // Room for so many merges.
  explicit MergeTable(size_t merges = 0) {
    size_t slots = 16;
    while (slots < 2 * merges) slots *= 2;
    slots_.assign(slots, {0, {kNone, -1}});
  }
  // False: the pair is there already.
  bool Add(int32_t left, int32_t right, Merge merge) {
    const uint64_t key = Key(left, right);
    size_t i = Mix64(key) & (slots_.size() - 1);
    for (; slots_[i].merge.rank != kNone; i = (i + 1) & (slots_.size() - 1))
      if (slots_[i].key == key) return false;
    slots_[i] = {key, merge};
    return true;
  }
  const Merge& Find(int32_t left, int32_t right) const {
    const uint64_t key = Key(left, right);
    size_t i = Mix64(key) & (slots_.size() - 1);
    while (slots_[i].merge.rank != kNone && slots_[i].key != key) i = (i + 1) & (slots_.size() - 1);
    return slots_[i].merge;
  }

 private:
  struct Slot {
    uint64_t key;
    Merge merge;
  };
  static uint64_t Key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
  }
  std::vector<Slot> slots_;
};

// A vocabulary of merges. Filled by tokenizer_json.cc or gguf_sentencepiece.cc, immutable after that.
struct BpeModel {
  MergeTable merges;
  bool byte_level = false;            // a symbol is a byte, else a character
  std::array<int32_t, 256> byte_id;   // byte_level: of each byte; else of the fallback tokens <0x00>..; -1: no token
  std::vector<int32_t> character_id;  // by code point; -1 and beyond the end: no token
  bool byte_fallback = false;         // a character without a token is its bytes, if all of them have one
  int32_t unk = -1;                   // what is left becomes this; -1: is an error
  bool fuse_unk = false;              // a run of unk is one
  bool ignore_merges = false;         // a piece that is a token of the model is not merged but found here
  StringToId whole_pieces;
  // No merge leads across the place in front of a U+2581 that stands behind another character: what lies on either side
  // is encoded apart, and remembered. Only with ignore_merges off.
  bool cut_at_words = false;
  static constexpr std::string_view kWordStart = "\xE2\x96\x81";
  // A merge to this token leads across such a place.
  static bool SpansWords(std::string_view token) {
    while (token.starts_with(kWordStart)) token.remove_prefix(kWordStart.size());
    return token.find(kWordStart) != token.npos;
  }

  // SentencePiece's own models only, for it merges whatever spells a token. Symbols from first_spelled on are
  // characters that are parts of tokens and no tokens themselves, `spelled` their bytes: one that is left over is a
  // fallback or unk.
  int32_t first_spelled = std::numeric_limits<int32_t>::max();
  std::vector<std::string> spelled;
  // By symbol: tokens on the way to others that no text ever becomes. One that is left over falls apart into the last
  // pair that made it. Empty: there is none.
  std::vector<bool> unused;
};

// One call of Encode: the scratch of merging.
class BpeEncoder {
 public:
  explicit BpeEncoder(const BpeModel& model) : model_(model) {}
  // Appends the ids of a piece, in O(n log n). kUnsupported: a byte or character without a token (and no unk).
  // kOutOfRange: 2 GiB or more.
  Status Encode(std::string_view piece, std::vector<int32_t>* ids);

 private:
  Status EncodePart(std::string_view piece, std::vector<int32_t>* ids);
  Status Symbols(std::string_view piece);
  void MergeAll();
  Status Resolve(int32_t symbol, size_t begin, std::vector<int32_t>* ids) const;

  const BpeModel& model_;
  struct Symbol {
    int32_t id;
    uint32_t previous, next;
  };
  std::vector<Symbol> symbols_;
  std::vector<uint64_t> heap_;  // rank << 32 | index of the left symbol: the smallest first
  std::unordered_map<int32_t, std::pair<int32_t, int32_t>> made_of_;  // unused symbols of this part

  // Pieces repeat: the last one of each hash is remembered.
  struct Remembered {
    std::string piece;
    std::vector<int32_t> ids;
  };
  std::vector<Remembered> remembered_;
};

}  // namespace livequant
