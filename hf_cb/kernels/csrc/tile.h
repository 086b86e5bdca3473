// Attention of one piece of work: FlashAttention's running softmax (Dao et al., 2022) over tiles of keys, in float32.
#pragma once

#include <memory>

#include "matrix.h"
#include "plan.h"

namespace hf_cb {

// One layer's call. Strides in elements; heads lie `*_head` apart, and a head's elements side by side.
template <typename T>
struct Call {
  const T *q, *k, *v;  // queries packed [T, Hq, D]; keys and values in the cache
  T* out;              // [T, Hq, Dv]
  int64_t q_token, q_head;
  int64_t k_block, k_slot, k_head;
  int64_t v_block, v_slot, v_head;
  const int32_t* table;  // [rows, table_width]
  int64_t table_width, block_size;
  int64_t heads, group, size, value_size;  // key heads, query heads of each, D, Dv
  float scale, softcap;                    // softcap 0: none
  const float* sinks;                      // [Hq], or null
  Visibility sees;
  float* partials;  // rows of [Dv + 2]: sums of values, maximum, sum of weights
  bool matrix;      // whether there is AMX to use

  int64_t padded_value_size() const { return round_up(value_size, kLanes); }
  int64_t partial_stride() const { return value_size + 2; }
};

// A thread's memory, kept between calls: fresh pages for every layer would cost more than many a piece.
class Scratch {
 public:
  float* take(int64_t floats) {
    float* taken = memory_.get() + used_;
    used_ += round_up(floats, 16);
    return taken;
  }
  void reset(int64_t floats) {
    used_ = 0;
    if (floats <= size_) return;
    memory_.reset(static_cast<float*>(::operator new[](floats * sizeof(float), std::align_val_t(64))));
    size_ = floats;
  }

 private:
  struct Free {
    void operator()(float* memory) const { ::operator delete[](memory, std::align_val_t(64)); }
  };
  std::unique_ptr<float, Free> memory_;
  int64_t size_ = 0, used_ = 0;
};

// out = sums / weights, the sink's weight included.
template <typename T>
inline void finish(const Call<T>& call, int64_t token, int64_t head, const float* sums, float maximum, float weights) {
  float factor = 1.0f;
  if (call.sinks) {
    const float highest = std::max(maximum, call.sinks[head]);
    factor = std::exp(maximum - highest);
    weights = weights * factor + std::exp(call.sinks[head] - highest);
  }
  factor /= weights;
  T* out = call.out + (token * call.heads * call.group + head) * call.value_size;
  for (int64_t i = 0; i < call.value_size; ++i) out[i] = static_cast<T>(sums[i] * factor);
}

template <typename T>
class PieceRunner {
 public:
  // `following`: the piece that this thread takes next, or null.
  PieceRunner(const Call<T>& call, const Piece& piece, const Piece* following, Scratch& scratch)
      : call_(call), piece_(piece), following_(following), rows_(piece.queries * call.group), value_stride_(call.padded_value_size()) {
    const int64_t total = rows_ * (piece.head_end - piece.head_begin);
    scratch.reset(total * (call.size + value_stride_ + 32) + kTile * (call.size + value_stride_) + kMostMatrixRows * kTile +
                  256);
    q_ = scratch.take(total * call.size);
    sums_ = scratch.take(total * value_stride_);
    maxima_ = scratch.take(total);
    weights_ = scratch.take(total);
    keys_ = scratch.take(kTile * call.size);
    values_ = scratch.take(kTile * value_stride_);
    scores_ = scratch.take(kMostMatrixRows * kTile);
    for (int64_t i = 0; i < call.size; ++i) key_rows_[i] = keys_ + i * kTile;
    std::fill_n(sums_, total * value_stride_, 0.0f);
    std::fill_n(maxima_, total, -kInfinity);
    std::fill_n(weights_, total, 0.0f);
    load_queries();
  }

  void run() {
    for (int64_t tile = piece_.key_begin / kTile * kTile; tile < piece_.key_end; tile += kTile) {
      begin_ = int(std::max<int64_t>(piece_.key_begin - tile, 0));
      end_ = int(std::min<int64_t>(piece_.key_end - tile, kTile));
      tile_ = tile;
      if (tile > piece_.key_begin) {
        std::copy_n(key_at_ + kTile, kTile, key_at_);
        std::copy_n(value_at_ + kTile, kTile, value_at_);
      } else {
        find_slots(piece_, tile, begin_, end_, key_at_, value_at_);
      }
      find_next();
      for (int64_t head = piece_.head_begin; head < piece_.head_end; ++head) attend(head);
    }
    if (call_.matrix) release_matrix();
    for (int64_t head = piece_.head_begin; head < piece_.head_end; ++head) store(head);
  }

 private:
  static constexpr int kKeys = kPairs<T> ? 2 : 1;  // whose values are multiplied at once
  int64_t depth() const { return kPairs<T> ? (call_.size + 1) / 2 : call_.size; }  // of a product with a key
  int64_t first_row(int64_t head) const { return (head - piece_.head_begin) * rows_; }

  void load_queries() {
    for (int64_t head = piece_.head_begin; head < piece_.head_end; ++head)
      for (int64_t row = 0; row < rows_; ++row) {
        const int64_t token = piece_.token + row / call_.group, query_head = head * call_.group + row % call_.group;
        const T* from = call_.q + token * call_.q_token + query_head * call_.q_head;
        float* to = q_ + (first_row(head) + row) * call_.size;
        if constexpr (kPairs<T>) {
          if (call_.size % 2) to[depth() - 1] = 0.0f;
          std::memcpy(to, from, call_.size * sizeof(T));
        } else {
          to_float(from, to, call_.size);
          for (int64_t i = 0; i < call_.size; ++i) to[i] *= call_.scale;
        }
      }
  }

  // Where the keys and values of a tile lie, from column `from` to `to`.
  void find_slots(const Piece& piece, int64_t tile, int64_t from, int64_t to, int64_t* keys, int64_t* values) const {
    const int32_t* table = call_.table + piece.row * call_.table_width;
    while (from < to) {
      const int64_t block = table[(tile + from) / call_.block_size], offset = (tile + from) % call_.block_size;
      const int64_t stop = std::min(to, from + call_.block_size - offset);
      int64_t key = block * call_.k_block + offset * call_.k_slot, value = block * call_.v_block + offset * call_.v_slot;
      for (; from < stop; ++from, key += call_.k_slot, value += call_.v_slot) keys[from] = key, values[from] = value;
    }
  }

  // The tile after this one: the piece's own, or the first of the piece that follows.
  void find_next() {
    const bool own = tile_ + kTile < piece_.key_end;
    next_ = own ? &piece_ : following_;
    if (!next_) return;
    const int64_t tile = own ? tile_ + kTile : next_->key_begin / kTile * kTile;
    next_begin_ = std::max<int64_t>(next_->key_begin - tile, 0);
    next_end_ = std::min<int64_t>(next_->key_end - tile, kTile);
    find_slots(*next_, tile, next_begin_, next_end_, key_at_ + kTile, value_at_ + kTile);
  }

  // This head's share of the next tile, all heads of a key together.
  Ahead next_tile(int64_t head) const {
    Ahead ahead;
    if (!next_) return ahead;
    const int64_t heads = piece_.head_end - piece_.head_begin, part = head - piece_.head_begin;
    const int64_t count = next_end_ - next_begin_, next_heads = next_->head_end - next_->head_begin;
    const int first = int(next_begin_ + count * part / heads), last = int(next_begin_ + count * (part + 1) / heads);
    if (first == last) return ahead;
    ahead.add(call_.k + next_->head_begin * call_.k_head, sizeof(T), key_at_ + kTile, first, last,
              ((next_heads - 1) * call_.k_head + call_.size) * sizeof(T));
    ahead.add(call_.v + next_->head_begin * call_.v_head, sizeof(T), value_at_ + kTile, first, last,
              ((next_heads - 1) * call_.v_head + call_.value_size) * sizeof(T));
    ahead.spread((end_ - begin_ + kLanes - 1) / kLanes * call_.size * sizeof(T) / 16 + depth() + (end_ - begin_) / kKeys + 1);
    return ahead;
  }

  // The tile's keys of one head, transposed: keys_[depth, kTile]. Columns outside begin_:end_ hold anything.
  void transpose_keys(int64_t head, Ahead& ahead) {
    const T* k = call_.k + head * call_.k_head;
    for (int first = begin_ / kLanes * kLanes; first < end_; first += kLanes) {
      const T* rows[kLanes];
      for (int i = 0; i < kLanes; ++i) rows[i] = k + key_at_[std::clamp(first + i, begin_, end_ - 1)];
      if constexpr (kPairs<T>)
        transpose_pairs(rows, keys_ + first, kTile, call_.size, ahead);
      else
        transpose(rows, keys_ + first, kTile, call_.size, ahead);
    }
  }

  // The tile's values of one head as rows of floats in whole vectors, in place where they are that already; or two keys' as one
  // row of pairs.
  void widen_values(int64_t head) {
    const T* v = call_.v + head * call_.v_head;
    if constexpr (kPairs<T>) {
      static const T zeros[kMaxHeadSize] = {};  // for a key that isn't this piece's: its weight is zero, but it may be no number
      const auto row = [&](int key) { return key >= begin_ && key < end_ ? v + value_at_[key] : zeros; };
      for (int key = begin_ / 2 * 2; key < end_; key += 2) {
        float* to = values_ + key / 2 * value_stride_;
        interleave(row(key), row(key + 1), to, call_.value_size);
        value_rows_[key / 2] = to;
      }
      return;
    }
    if constexpr (std::is_same_v<T, float>)
      if (value_stride_ == call_.value_size) {
        for (int key = begin_; key < end_; ++key) value_rows_[key] = v + value_at_[key];
        return;
      }
    for (int key = begin_; key < end_; ++key) {
      float* to = values_ + key * value_stride_;
      to_float(v + value_at_[key], to, call_.value_size);
      std::fill(to + call_.value_size, to + value_stride_, 0.0f);
      value_rows_[key] = to;
    }
  }

  // The keys of the tile that a row of this piece sees, as columns; empty where the second is not larger.
  std::pair<int, int> visible(int64_t row) const {
    const int64_t position = piece_.position + row / call_.group;
    return {int(std::max<int64_t>(begin_, call_.sees.first(position) - tile_)),
            int(std::min<int64_t>(end_, position + 1 - tile_))};
  }

  void attend(int64_t head) {
    Ahead ahead = next_tile(head);
    transpose_keys(head, ahead);
    widen_values(head);
    for (int64_t row = 0, count; row < rows_; row += count) {
      const bool by_matrix = kHasMatrix<T> && call_.matrix && (count = matrix_rows(rows_ - row));
      if (!by_matrix) count = std::min<int64_t>(kRows, rows_ - row);
      const int first = visible(row).first, last = visible(row + count - 1).second;  // both grow with the row
      if (first >= last) continue;
      const int from = first / kLanes * kLanes, to = int(round_up(last, kLanes));
      const int64_t at = first_row(head) + row;
      const float* q = q_ + at * call_.size;
      float* sums = sums_ + at * value_stride_;
      const int key = first / kKeys, end = (last + kKeys - 1) / kKeys;
      if (by_matrix)
        multiply_matrix(count, to - from, depth(), q, call_.size, keys_ + from, kTile, scores_ + from, kTile, false);
      else
        multiply<kPairs<T>>(int(count), q, call_.size, key_rows_, from, to, 0, int(depth()), scores_, kTile, false, ahead);
      for (int i = 0; i < count; ++i) soften(scores_ + i * kTile, visible(row + i), from, to, at + i);
      if (by_matrix)
        multiply_matrix(count, value_stride_, end - key, scores_ + key, kTile, value_rows_[key], value_stride_, sums, value_stride_, true);
      else
        multiply<kPairs<T>>(int(count), scores_, kTile, value_rows_, 0, value_stride_, key, end, sums, value_stride_, true, ahead);
    }
  }

  // Scores [from:to] of one row become weights relative to its new maximum; what it doesn't see weighs nothing. Weights to be
  // multiplied in pairs are rounded to bfloat16, two to a word.
  void soften(float* scores, std::pair<int, int> seen, int from, int to, int64_t row) {
    const auto forget = [&] { std::fill(scores + from / kKeys, scores + to / kKeys, 0.0f); };
    if (seen.first >= seen.second) return forget();
    Vec highest(-kInfinity);
    for (int i = from; i < to; i += kLanes) {
      Vec score = Vec::loadu(scores + i);
      if constexpr (kPairs<T>) score = score * Vec(call_.scale);
      if (call_.softcap != 0.0f) score = Vec(call_.softcap) * (score / Vec(call_.softcap)).tanh();
      if (i < seen.first || i + kLanes > seen.second) {
        const Vec column = Vec::arange(float(i), 1.0f);
        score = Vec::blendv(Vec(-kInfinity), score, column >= Vec(float(seen.first)));
        score = Vec::blendv(Vec(-kInfinity), score, column < Vec(float(seen.second)));
      }
      score.store(scores + i);
      highest = at::vec::maximum(highest, score);
    }
    const float before = maxima_[row], maximum = std::max(before, maximum_of(highest));
    // Nothing but minus infinity so far: these keys weigh nothing beside any later one.
    if (maximum == -kInfinity) return forget();
    Vec total(0.0f);
    for (int i = from; i < to; i += kLanes) {
      const Vec weight = exponential(Vec::loadu(scores + i) - Vec(maximum));
      total = total + weight;
#if HF_CB_PAIRS
      if constexpr (kPairs<T>) {
        store_pairs(weight, scores + i / 2);
        continue;
      }
#endif
      weight.store(scores + i);
    }
    if (maximum != before) {  // the first time the factor is exp(-infinity) = 0, and so are the sums
      const float factor = std::exp(before - maximum);
      maxima_[row] = maximum;
      weights_[row] *= factor;
      float* sums = sums_ + row * value_stride_;
      for (int64_t i = 0; i < value_stride_; i += kLanes) (Vec::loadu(sums + i) * Vec(factor)).store(sums + i);
    }
    weights_[row] += sum_of(total);
  }

  void store(int64_t head) {
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t at = first_row(head) + row;
      if (piece_.partial < 0) {
        finish(call_, piece_.token + row / call_.group, head * call_.group + row % call_.group, sums_ + at * value_stride_,
               maxima_[at], weights_[at]);
        continue;
      }
      float* partial = call_.partials + (piece_.partial + head * rows_ + row) * call_.partial_stride();
      std::memcpy(partial, sums_ + at * value_stride_, call_.value_size * sizeof(float));
      partial[call_.value_size] = maxima_[at];
      partial[call_.value_size + 1] = weights_[at];
    }
  }

  const Call<T>& call_;
  const Piece piece_;
  const Piece* const following_;
  const Piece* next_ = nullptr;              // whose tile comes next,
  int64_t next_begin_ = 0, next_end_ = 0;    // and its columns
  const int64_t rows_;          // of each key head: query by query, its group of heads together
  const int64_t value_stride_;  // Dv in whole vectors
  float *q_, *sums_, *maxima_, *weights_, *keys_, *values_, *scores_;
  int64_t tile_ = 0;            // position of column 0
  int begin_ = 0, end_ = 0;     // the columns that are this piece's
  int64_t key_at_[2 * kTile] = {}, value_at_[2 * kTile] = {};  // of this tile and the next
  const float* key_rows_[kMaxHeadSize];
  const float* value_rows_[kTile];
};

// Adds up the partial results of one query and head, in the order of the keys.
template <typename T>
inline void merge(const Call<T>& call, const Merge& merge, int64_t head, int64_t row, float* sums) {
  const int64_t rows = merge.queries * call.group, size = call.value_size;
  const float* first = call.partials + (merge.partial + head * rows + row) * call.partial_stride();
  const int64_t split_stride = call.heads * rows * call.partial_stride();
  float maximum = -kInfinity, weights = 0.0f;
  for (int64_t split = 0; split < merge.splits; ++split) maximum = std::max(maximum, first[split * split_stride + size]);
  std::fill_n(sums, size, 0.0f);
  for (int64_t split = 0; split < merge.splits; ++split) {
    const float* partial = first + split * split_stride;
    const float factor = std::exp(partial[size] - maximum);
    weights += partial[size + 1] * factor;
    for (int64_t i = 0; i < size; ++i) sums[i] += partial[i] * factor;
  }
  finish(call, merge.token + row / call.group, head * call.group + row % call.group, sums, maximum, weights);
}

}  // namespace hf_cb
