// attention/cpu/workspace.h: the scratch of AttendGeneric, laid out once in one allocation.
//
// Invariants: a call allocates nothing. Everything but `slots` is bounded by tiles: it does not depend on history
// length. `slots` holds the leaf states of calls too small to fill the threads (decode): kLeafRows rows of history a
// slot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention/attention.h"

namespace livequant {

inline constexpr int kTileRows = 128;
inline constexpr int kBlockRows =
    128;  // query rows (positions x query heads of a group) of a work item, unless one group is larger
inline constexpr int kPiecesPerThread = 1;

// Running softmax of `m` query rows: maximum, sum of exponentials, unnormalized output rows of `padded_dim` values.
// A row that has seen nothing has maximum -inf; its other fields are then never read.
struct SoftmaxState {
  float* max;
  float* sum;
  float* out;
};

struct AttentionWorkspace::Impl {
  // Query rows [first, first + count) of one sequence (relative to its step) for one KV head.
  struct Item {
    int sequence, head, first, count;
    int64_t leaf_begin, leaf_end;
    int64_t slot;  // where its leaf states start, when split
  };
  // Leaves [begin, end) of an item.
  struct Piece {
    int item;
    int64_t begin, end;
  };
  struct Thread {
    float* q;      // [block][dim]
    float* score;  // [block][kLeafRows]
    float* mixed;  // [block][kTileRows]: scores or weights of one form where a tile has rows in both
    float* rows;   // [kTileRows][dim] decoded
    float* keys;   // [dim][kTileRows] transposed
    SoftmaxState leaf, node, total;
    int32_t* coded[2];  // K, V: rows that query i of the block reads coded
  };

  // What a cut into items and pieces depends on.
  struct Shape {
    uint64_t step = 0;
    int num_q_heads = 0, num_kv_heads = 0, head_dim = 0, window = 0;
    bool operator==(const Shape&) const = default;
  };

  Shape shape;  // of `items` and `pieces`
  int threads, max_rows, max_q_heads, max_head_dim, padded_dim, block;
  int64_t max_len, bytes, slot_floats;
  std::vector<Item> items;
  std::vector<Piece> pieces;
  std::vector<Thread> thread;
  float* slots;
  struct Free {
    void operator()(float* p) const;
  };
  std::unique_ptr<float, Free> memory;
};

// Head size in whole vectors of any ISA.
constexpr int PaddedDim(int dim) { return (dim + 15) / 16 * 16; }

}  // namespace livequant
