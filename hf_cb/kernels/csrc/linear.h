// Products of rows with a weight that was laid out once for them: y = x W^T + b, with x [M, K] and W [N, K].
//
// The weight lies in panels of two vectors of columns, step by step down its depth, so that a product reads it as one stream.
// With few rows that stream is all the time there is; the panels to come are asked for between products, so that with more
// rows reading and multiplying overlap. Sums stay in float32 and go down the depth in one order whatever the number of rows:
// a row's bits are the same in any company. (With AMX, sixteen rows and more go through oneDNN's kernels, which don't promise that.)
#pragma once

#include <vector>

#include "matrix.h"
#include "share.h"

namespace hf_cb {

constexpr int kPanel = 2 * kLanes;                          // columns
constexpr int kPanelsOfTile = kColumns / 2;                 // whose sums are in registers at once
constexpr int64_t kDepthBlock = 2048;                       // steps: two panels and a block of rows stay in the second cache
constexpr int64_t kRowBlock = 96;
constexpr int64_t kSumsOfRow = 2 * kPanel;                  // floats kept of a row between blocks of depth
constexpr int kUnroll = 4;                                  // steps between two requests for memory

enum class Activation : int64_t { kNone, kSilu, kGelu, kGeluTanh };

// What a step of the depth is: one number, converted to float as it is read; or with AVX512-BF16 a pair, multiplied as such.
template <typename T>
struct Step {
  using Factor = float;
  static constexpr int kDepth = 1;
  static Vec load(const T* from) {
    if constexpr (std::is_same_v<T, float>) return Vec::loadu(from);
    Vec wide;
    if constexpr (!std::is_same_v<T, float>) at::vec::load_to_float<T>(from, wide);
    return wide;
  }
  static Vec add(float factor, Vec weights, Vec sum) { return at::vec::fmadd(Vec(factor), weights, sum); }
};
#if HF_CB_PAIRS
template <>
struct Step<at::BFloat16> {
  using Factor = int32_t;
  static constexpr int kDepth = 2;
  static __m512i load(const at::BFloat16* from) { return _mm512_loadu_si512(from); }
  static Vec add(int32_t pair, __m512i weights, Vec sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)weights);
  }
};
#endif

// Rows whose sums of C vectors stay in registers, beside the weights.
template <int C>
constexpr int kTileRows = kColumns == 4 || C == 2 ? kRows : kRows / 2;

// Memory that will be read soon.
struct Stream {
  const char *at = nullptr, *end = nullptr;
  int64_t also = 0;  // bytes from there to as much again; 0: no more
  int lines = 0;     // to ask for every kUnroll steps

  void ask() {
    if (at >= end) return;
    for (int i = 0; i < lines; ++i) __builtin_prefetch(at + i * 64, 0, 2);
    if (also)
      for (int i = 0; i < lines; ++i) __builtin_prefetch(at + also + i * 64, 0, 2);
    at += lines * 64;
  }
};

// One product. `weight` is packed: [panels, steps, kPanel, kDepth].
template <typename T>
struct Product {
  using S = Step<T>;
  const typename S::Factor* x;  // [rows, steps]
  int64_t rows, steps;
  const T* weight;
  int64_t panels;
  const float* bias;  // [panels * kPanel], or null
  const T* residual;  // [rows, width], added to the rounded result, or null
  T* out;             // [rows, width]
  int64_t width;
  Activation activation;  // kNone: every panel gives columns. Else the first half are gates, and the others what they gate
  bool swapped;           // the other way round
  bool matrix;            // whether there is AMX to use

  bool gated() const { return activation != Activation::kNone; }
  int64_t columns_of_panels() const { return gated() ? panels / 2 : panels; }
  int64_t panel_size() const { return steps * kPanel * S::kDepth; }
};

template <typename T>
inline void load_pair(const T* from, Vec& a, Vec& b) {
  if constexpr (std::is_same_v<T, float>)
    a = Vec::loadu(from), b = Vec::loadu(from + kLanes);
  else
    std::tie(a, b) = at::vec::convert_to_float<T>(at::vec::Vectorized<T>::loadu(from));
}

template <typename T>
inline void load_pair(const T* from, int64_t count, Vec& a, Vec& b) {
  if (count >= kPanel) return load_pair(from, a, b);
  T all[kPanel] = {};
  std::memcpy(all, from, count * sizeof(T));
  load_pair(all, a, b);
}

template <typename T>
inline void store_panel(Vec a, Vec b, T* to, int64_t columns) {
  if constexpr (std::is_same_v<T, float>) {
    if (columns >= kPanel) return a.store(to), b.store(to + kLanes);
    float all[kPanel];
    a.store(all), b.store(all + kLanes);
    std::memcpy(to, all, columns * sizeof(float));
  } else {
    const auto narrow = at::vec::convert_from_float<T>(a, b);
    narrow.store(to, int(std::min<int64_t>(columns, kPanel)));
  }
}

// As after a store: a layer's output is rounded, whoever takes it.
template <typename T>
inline void round_to(Vec& a, Vec& b) {
  if constexpr (!std::is_same_v<T, float>) std::tie(a, b) = at::vec::convert_to_float<T>(at::vec::convert_from_float<T>(a, b));
}

inline Vec activate(Activation kind, Vec x) {
  switch (kind) {
    case Activation::kSilu: return x / (Vec(1.0f) + exponential(x.neg()));
    case Activation::kGelu: return x * Vec(0.5f) * (Vec(1.0f) + (x * Vec(0.70710678118654752f)).erf());
    case Activation::kGeluTanh: {
      const Vec inner = Vec(0.79788456080286536f) * (x + Vec(0.044715f) * x * x * x);
      return x * Vec(0.5f) * (Vec(1.0f) + inner.tanh());
    }
    default: return x;
  }
}

template <typename T, int R, int C>
class Tile {
  using S = Step<T>;

 public:
  // sums += x[R, from:from + steps] times the panels at `left` and, for four vectors, `right`.
  __attribute__((always_inline)) void multiply(const Product<T>& product, int64_t row, int64_t from, int64_t steps, const T* left,
                                               const T* right, Stream& ahead) {
    const auto* x = product.x + row * product.steps + from;
    const auto one = [&](int64_t step) __attribute__((always_inline)) {
      decltype(S::load(left)) weights[C];
#pragma GCC unroll 4
      for (int j = 0; j < C; ++j) weights[j] = S::load((j < 2 ? left : right) + j % 2 * kLanes * S::kDepth);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < C; ++j) sums_[r][j] = S::add(x[r * product.steps + step], weights[j], sums_[r][j]);
      left += kPanel * S::kDepth;
      right += kPanel * S::kDepth;
    };
    int64_t step = 0;
    for (; step + kUnroll <= steps; step += kUnroll) {
      ahead.ask();
#pragma GCC unroll 4
      for (int i = 0; i < kUnroll; ++i) one(step + i);
    }
    for (; step < steps; ++step) one(step);
  }

  void load(const float* from) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < C; ++j) sums_[r][j] = from ? Vec::loadu(from + r * kSumsOfRow + j * kLanes) : Vec(0.0f);
  }

  void keep(float* to) const {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < C; ++j) sums_[r][j].store(to + r * kSumsOfRow + j * kLanes);
  }

  // Biases, activations, and out they go. `panel`: among the output's.
  void finish(const Product<T>& product, int64_t row, int64_t panel) {
    const int64_t columns = product.width - panel * kPanel;
    T* out = product.out + row * product.width + panel * kPanel;
    if (product.bias) {
      const float* left = product.bias + panel * kPanel;
      const float* right = left + (product.gated() ? product.panels / 2 * kPanel : kPanel);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < C; ++j) sums_[r][j] = sums_[r][j] + Vec::loadu((j < 2 ? left : right) + j % 2 * kLanes);
    }
    for (int r = 0; r < R; ++r, out += product.width) {
      auto& s = sums_[r];
      if constexpr (C == 4) {
        if (product.gated()) {
          round_to<T>(s[0], s[1]), round_to<T>(s[2], s[3]);
          if (product.swapped) std::swap(s[0], s[2]), std::swap(s[1], s[3]);
          s[0] = activate(product.activation, s[0]), s[1] = activate(product.activation, s[1]);
          round_to<T>(s[0], s[1]);
          store_panel(s[0] * s[2], s[1] * s[3], out, columns);
          continue;
        }
        if (product.residual) add_residual(product, row + r, panel + 1, s[2], s[3]);
        store_panel(s[2], s[3], out + kPanel, columns - kPanel);
      }
      if (product.residual) add_residual(product, row + r, panel, s[0], s[1]);
      store_panel(s[0], s[1], out, columns);
    }
  }

 private:
  static void add_residual(const Product<T>& product, int64_t row, int64_t panel, Vec& a, Vec& b) {
    Vec x, y;
    load_pair(product.residual + row * product.width + panel * kPanel, product.width - panel * kPanel, x, y);
    round_to<T>(a, b);
    a = x + a, b = y + b;
  }

  Vec sums_[R][C];
};

// Some rows times one panel, or two.
template <typename T>
class Block {
 public:
  // `kept`: room for rows times kSumsOfRow.
  Block(const Product<T>& product, int64_t first, int64_t rows, int64_t panel, bool two, Stream ahead, float* kept)
      : product_(product), first_(first), rows_(rows), panel_(panel), two_(two), ahead_(ahead), kept_(kept) {}

  void run() {
    const int64_t by_matrix = product_.matrix ? rows_ / kMatrixRows * kMatrixRows : 0;
    if (by_matrix) run_matrix(by_matrix);
    const int most = two_ ? kTileRows<4> : kTileRows<2>;
    const int64_t left = rows_ - by_matrix, tiles = (left + most - 1) / most;
    if (tiles < 2)
      ahead_.at = ahead_.end;  // nothing to hide it behind: the processor follows a stream by itself, and better
    else
      ahead_.lines = (ahead_.lines + tiles - 1) / tiles;
    for (int64_t from = 0; from < product_.steps; from += kDepthBlock) {
      const int64_t steps = std::min(kDepthBlock, product_.steps - from);
      for (int64_t i = 0; i < tiles; ++i) {
        const int64_t row = by_matrix + left * i / tiles, count = by_matrix + left * (i + 1) / tiles - row;
        two_ ? choose<4>(int(count), row, from, steps) : choose<2>(int(count), row, from, steps);
      }
    }
  }

 private:
  const T* weights(int64_t panel, int64_t from) const {
    return product_.weight + panel * product_.panel_size() + from * kPanel * Step<T>::kDepth;
  }
  int64_t other_panel() const { return panel_ + (product_.gated() ? product_.panels / 2 : 1); }

  template <int C>
  void choose(int count, int64_t row, int64_t from, int64_t steps) {
    switch (count) {
      case 1: return tile<1, C>(row, from, steps);
      case 2: return tile<2, C>(row, from, steps);
      case 3: return tile<3, C>(row, from, steps);
    }
    if constexpr (kTileRows<C> == 6) switch (count) {
      case 4: return tile<4, C>(row, from, steps);
      case 5: return tile<5, C>(row, from, steps);
      default: return tile<6, C>(row, from, steps);
    }
  }

  template <int R, int C>
  void tile(int64_t row, int64_t from, int64_t steps) {
    Tile<T, R, C> tile;
    tile.load(from ? kept_ + row * kSumsOfRow : nullptr);
    tile.multiply(product_, first_ + row, from, steps, weights(panel_, from), weights(other_panel(), from), ahead_);
    if (from + steps < product_.steps)
      tile.keep(kept_ + row * kSumsOfRow);
    else
      tile.finish(product_, first_ + row, panel_);
  }

  // Whole tiles of rows, so that a few kernels do for all.
  void run_matrix(int64_t rows) {
    if constexpr (kHasMatrix<T>) {
      for (int64_t row = 0, count; row < rows; row += count) {
        count = matrix_rows(rows - row);
        const auto* x = product_.x + (first_ + row) * product_.steps;
        for (int i = 0; i < (two_ ? 2 : 1); ++i)
          multiply_matrix(count, kPanel, product_.steps, x, product_.steps, weights(i ? other_panel() : panel_, 0), kPanel,
                          kept_ + i * kPanel, kSumsOfRow, false);
        for (int64_t r = 0; r < count; ++r) two_ ? finish_row<4>(row + r, r) : finish_row<2>(row + r, r);
      }
    }
  }
  template <int C>
  void finish_row(int64_t row, int64_t kept) {
    Tile<T, 1, C> tile;
    tile.load(kept_ + kept * kSumsOfRow);
    tile.finish(product_, first_ + row, panel_);
  }

  const Product<T>& product_;
  const int64_t first_, rows_, panel_;  // the first of `rows`, and of the panels
  const bool two_;
  Stream ahead_;
  float* kept_;
};

template <typename T>
void multiply(const Product<T>& product) {
  constexpr int64_t kWorth = 1 << 16;  // products that are worth another thread
  const int64_t blocks = std::max<int64_t>(1, (product.rows + kRowBlock - 1) / kRowBlock), panels = product.columns_of_panels();
  const int64_t most = (product.rows + blocks - 1) / blocks;
  const int64_t grain = 1 + kWorth / (most * product.steps * kPanel * (product.gated() ? 2 : 1));
  share_stretches(blocks * panels, grain, [&](int64_t unit, int64_t end) {
    const bool keeps = product.steps > kDepthBlock || product.matrix;
    std::vector<float> kept(keeps ? std::max<int64_t>(most, kMostMatrixRows) * kSumsOfRow : 0);
    while (unit < end) {
      const int64_t block = unit / panels, panel = unit % panels, first = product.rows * block / blocks;
      const int width = !product.gated() && kPanelsOfTile == 2 && panel + 1 < panels && unit + 1 < end ? 2 : 1;
      Stream ahead;
      const int64_t next = panel + width;
      if (next < panels && unit + width < end) {
        ahead.at = reinterpret_cast<const char*>(product.weight + next * product.panel_size());
        ahead.end = ahead.at + width * product.panel_size() * sizeof(T);
        ahead.also = product.gated() ? panels * product.panel_size() * sizeof(T) : 0;
        ahead.lines = width * kUnroll * kPanel * Step<T>::kDepth * int(sizeof(T)) / 64;
      }
      Block<T>(product, first, product.rows * (block + 1) / blocks - first, panel, width == 2 || product.gated(), ahead,
               kept.data())
          .run();
      unit += width;
    }
    if (product.matrix) release_matrix();
  });
}

}  // namespace hf_cb
