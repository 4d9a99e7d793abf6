// text/bpe.cc: merges by a heap of (rank, place), so that a megabyte without a boundary is no attack.
#include "text/bpe.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "text/utf8.h"

namespace livequant {
namespace {

constexpr uint32_t kEnd = ~uint32_t{0};
constexpr size_t kRememberedPieces = 4096, kRememberedBytes = 48, kShortPiece = 3;

}  // namespace

Status BpeEncoder::Symbols(std::string_view piece) {
  symbols_.clear();
  const auto add = [&](int32_t id) { symbols_.push_back({id, 0, 0}); };
  bool unk = false;  // one is due; a fallback in between goes in front of it, as in huggingface/tokenizers
  const auto miss = [&](const std::string& what) -> Status {
    if (model_.unk < 0) return Status(Code::kUnsupported, fmt::format("tokenizer: no token for {}", what));
    if (unk && !model_.fuse_unk) add(model_.unk);
    unk = true;
    return {};
  };
  const auto hit = [&](int32_t id) {
    if (unk) add(model_.unk);
    unk = false;
    add(id);
  };
  if (model_.byte_level) {
    for (const char c : piece) {
      const auto byte = static_cast<unsigned char>(c);
      if (const int32_t id = model_.byte_id[byte]; id >= 0) {
        hit(id);
      } else {
        LQ_RETURN_IF_ERROR(miss(fmt::format("byte 0x{:02x}", byte)));
      }
    }
  } else {
    for (size_t at = 0; at < piece.size();) {
      const Utf8Step c = NextUtf8(piece.substr(at));
      const std::string_view bytes = piece.substr(at, static_cast<size_t>(c.bytes));
      at += bytes.size();
      const int32_t id = c.code_point < model_.character_id.size() ? model_.character_id[c.code_point] : -1;
      if (id >= 0) {
        hit(id);
        continue;
      }
      if (model_.byte_fallback && std::all_of(bytes.begin(), bytes.end(), [&](char b) {
            return model_.byte_id[static_cast<unsigned char>(b)] >= 0;
          })) {
        for (const char b : bytes) add(model_.byte_id[static_cast<unsigned char>(b)]);
        continue;
      }
      LQ_RETURN_IF_ERROR(miss(fmt::format("character U+{:04X}", static_cast<uint32_t>(c.code_point))));
    }
  }
  if (unk) add(model_.unk);
  return {};
}

void BpeEncoder::MergeAll() {
  const auto n = static_cast<uint32_t>(symbols_.size());
  heap_.clear();
  made_of_.clear();
  const auto candidate = [&](uint32_t left, uint32_t right) {
    const int32_t a = symbols_[left].id, b = symbols_[right].id;
    const MergeTable::Merge& merge = model_.merges.Find(a, b);
    if (merge.rank == MergeTable::kNone) return false;
    if (!model_.unused.empty() && model_.unused[static_cast<size_t>(merge.result)]) made_of_[merge.result] = {a, b};
    heap_.push_back(uint64_t{merge.rank} << 32 | left);
    return true;
  };
  for (uint32_t i = 0; i < n; ++i) {
    symbols_[i].previous = i == 0 ? kEnd : i - 1;
    symbols_[i].next = i + 1 == n ? kEnd : i + 1;
    if (i > 0) candidate(i - 1, i);
  }
  std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
  const auto push = [&](uint32_t left, uint32_t right) {
    if (candidate(left, right)) std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
  };
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    const auto rank = static_cast<uint32_t>(heap_.back() >> 32);
    const auto at = static_cast<uint32_t>(heap_.back());
    heap_.pop_back();
    Symbol& left = symbols_[at];
    // An entry is stale once either symbol has been merged into something else; where what stands there now has the
    // same rank, its own entry says no more than this one.
    if (left.id < 0 || left.next == kEnd) continue;
    Symbol& right = symbols_[left.next];
    const MergeTable::Merge& merge = model_.merges.Find(left.id, right.id);
    if (merge.rank != rank) continue;
    left.id = merge.result;
    left.next = right.next;
    right.id = -1;
    if (left.previous != kEnd) push(left.previous, at);
    if (left.next != kEnd) {
      symbols_[left.next].previous = at;
      push(at, left.next);
    }
  }
}

// Appends the ids of a symbol that merging left over; those from `begin` on are of this part.
Status BpeEncoder::Resolve(int32_t symbol, size_t begin, std::vector<int32_t>* ids) const {
  if (symbol >= model_.first_spelled) {
    const std::string& bytes = model_.spelled[static_cast<size_t>(symbol - model_.first_spelled)];
    if (model_.byte_fallback) {
      for (const char b : bytes) ids->push_back(model_.byte_id[static_cast<unsigned char>(b)]);
      return {};
    }
    if (model_.unk < 0)
      return Status(Code::kUnsupported, fmt::format("tokenizer: no token for character U+{:04X}",
                                                    static_cast<uint32_t>(NextUtf8(bytes).code_point)));
    symbol = model_.unk;
  } else if (!model_.unused.empty() && model_.unused[static_cast<size_t>(symbol)]) {
    if (const auto pair = made_of_.find(symbol); pair != made_of_.end()) {  // else it is a character of the text
      LQ_RETURN_IF_ERROR(Resolve(pair->second.first, begin, ids));
      return Resolve(pair->second.second, begin, ids);
    }
  }
  if (symbol == model_.unk && model_.fuse_unk && ids->size() > begin && ids->back() == symbol) return {};
  ids->push_back(symbol);
  return {};
}

Status BpeEncoder::Encode(std::string_view piece, std::vector<int32_t>* ids) {
  if (piece.size() >= static_cast<size_t>(std::numeric_limits<int32_t>::max()))
    return Status(Code::kOutOfRange, fmt::format("a piece of {} bytes", piece.size()));
  if (model_.ignore_merges) {
    if (const auto whole = model_.whole_pieces.find(piece); whole != model_.whole_pieces.end()) {
      ids->push_back(whole->second);
      return {};
    }
  }
  constexpr std::string_view kStart = BpeModel::kWordStart;
  for (size_t done = 0; model_.cut_at_words;) {
    size_t at = done;
    while (piece.substr(at).starts_with(kStart)) at += kStart.size();
    at = piece.find(kStart, at);
    if (at == piece.npos) return EncodePart(piece.substr(done), ids);
    LQ_RETURN_IF_ERROR(EncodePart(piece.substr(done, at - done), ids));
    done = at;
  }
  return EncodePart(piece, ids);
}

Status BpeEncoder::EncodePart(std::string_view piece, std::vector<int32_t>* ids) {
  Remembered* place = nullptr;
  if (piece.size() >= kShortPiece && piece.size() <= kRememberedBytes) {
    if (remembered_.empty()) remembered_.resize(kRememberedPieces);
    place = &remembered_[StringHash()(piece) % kRememberedPieces];
    if (place->piece == piece) {
      ids->insert(ids->end(), place->ids.begin(), place->ids.end());
      return {};
    }
  }
  LQ_RETURN_IF_ERROR(Symbols(piece));
  MergeAll();
  const size_t before = ids->size();
  const bool plain = model_.spelled.empty() && model_.unused.empty();
  for (uint32_t i = symbols_.empty() ? kEnd : 0; i != kEnd; i = symbols_[i].next) {
    if (plain) {
      ids->push_back(symbols_[i].id);
    } else {
      LQ_RETURN_IF_ERROR(Resolve(symbols_[i].id, before, ids));
    }
  }
  if (place != nullptr) {
    place->piece = piece;
    place->ids.assign(ids->begin() + static_cast<int64_t>(before), ids->end());
  }
  return {};
}

}  // namespace livequant
