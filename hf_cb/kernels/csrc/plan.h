// The work of one step, cut into pieces that threads take one after another. Plain integers, so that layers can share them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace hf_cb {

// Keys are taken 64 at a time, at multiples of 64 positions: what a query sees is grouped alike in whatever chunk it comes.
constexpr int kTile = 64;
// A row's keys are cut at multiples of this many positions, and the parts added up in order. Nothing but positions decides,
// so that neither neighbours nor the number of threads change a bit.
constexpr int kSplit = 512;
// Query heads times queries of one piece: enough that the keys, once transposed, are well used.
constexpr int kPieceRows = 96;
constexpr int kMaxHeadSize = 1024;

struct Visibility {
  std::optional<int64_t> window, chunk;

  // The first position that a query at `position` sees; grows with it.
  int64_t first(int64_t position) const {
    int64_t first = 0;
    if (window) first = std::max(first, position - *window + 1);
    if (chunk) first = std::max(first, position / *chunk * *chunk);
    return first;
  }
};

// Some consecutive queries of one row, some of its key heads, some of the keys that they see.
struct Piece {
  int32_t row;
  int32_t token;     // packed index of the first query
  int32_t queries;
  int32_t position;  // of the first query
  int32_t head_begin, head_end;
  int32_t key_begin, key_end;
  int32_t partial;   // where in the partial results those of key head 0 begin; -1: these are all the keys, finish at once
};

// Queries whose keys were split: their partial results, one split after another, each [key heads, queries, group].
struct Merge {
  int32_t token, queries, partial, splits;
};

struct Plan {
  std::vector<Piece> pieces;  // the most work first, so that no long one is left for the end
  std::vector<Merge> merges;
  int64_t partial_rows = 0;
};

inline int64_t work(const Piece& piece, int64_t group) {
  constexpr int64_t kKeyCost = 8;  // to fetch a key and its value, in products with one query
  return (piece.queries * group + kKeyCost) * (piece.key_end - piece.key_begin) * (piece.head_end - piece.head_begin);
}

inline Plan make_plan(const int32_t* starts, const int32_t* key_lens, int64_t rows, int64_t heads, int64_t group,
                      const Visibility& sees, int64_t threads) {
  const int64_t most = std::max<int64_t>(1, kPieceRows / group);
  Plan plan;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t count = starts[row + 1] - starts[row];
    for (int64_t done = 0; done < count; done += most) {
      const int64_t queries = std::min(most, count - done), position = key_lens[row] - count + done;
      const int64_t begin = sees.first(position), end = position + queries;
      const int64_t token = starts[row] + done, splits = (end - 1) / kSplit - begin / kSplit + 1;
      int64_t partial = splits > 1 ? plan.partial_rows : -1;
      if (splits > 1) {
        plan.merges.push_back({int32_t(token), int32_t(queries), int32_t(partial), int32_t(splits)});
        plan.partial_rows += splits * heads * queries * group;
      }
      for (int64_t key = begin; key < end;) {
        const int64_t stop = std::min(end, (key / kSplit + 1) * kSplit);
        plan.pieces.push_back({int32_t(row), int32_t(token), int32_t(queries), int32_t(position), 0, int32_t(heads),
                               int32_t(key), int32_t(stop), int32_t(partial)});
        if (splits > 1) partial += heads * queries * group;
        key = stop;
      }
    }
  }
  // All heads of a query's keys lie side by side in memory, and are read fastest together. With few pieces a thread, the smallest
  // are dealt head by head, so that all threads end together; with very few, all of them.
  const auto most_first = [&](const Piece& a, const Piece& b) { return work(a, group) > work(b, group); };
  std::stable_sort(plan.pieces.begin(), plan.pieces.end(), most_first);
  const int64_t count = plan.pieces.size(), apart = count >= 4 * threads ? 0 : count >= 2 * threads ? (threads + 1) / 2 : count;
  std::vector<Piece> whole;
  whole.swap(plan.pieces);
  for (int64_t i = 0; i < count; ++i) {
    const Piece& piece = whole[i];
    if (i < count - apart && piece.queries * group * heads <= kPieceRows) {
      plan.pieces.push_back(piece);
      continue;
    }
    for (int64_t head = 0; head < heads; ++head) {
      plan.pieces.push_back(piece);
      plan.pieces.back().head_begin = int32_t(head);
      plan.pieces.back().head_end = int32_t(head + 1);
    }
  }
  std::stable_sort(plan.pieces.begin(), plan.pieces.end(), most_first);
  return plan;
}

}  // namespace hf_cb
