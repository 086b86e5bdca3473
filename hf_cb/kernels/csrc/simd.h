// Vectors of floats for the instruction set that the compiler was told to use, and the two loops that take all the time.
//
// Every product is an explicit fused multiply-add in an order that depends on neither the number of rows nor on what else is
// computed: a row's bits are the same in whichever block of rows it lands. (Build with -ffp-contract=off.)
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define CPU_CAPABILITY AVX512
#define CPU_CAPABILITY_AVX512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define CPU_CAPABILITY AVX2
#define CPU_CAPABILITY_AVX2
#else
#define CPU_CAPABILITY DEFAULT
#define CPU_CAPABILITY_DEFAULT
#endif

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/bit_cast.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

// Pairs of bfloat16 in the place of a float: AVX512-BF16 multiplies both with another pair and adds, exactly but for one rounding.
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
#define HF_CB_PAIRS 1
#else
#define HF_CB_PAIRS 0
#endif

namespace hf_cb {

template <typename T>
constexpr bool kPairs = HF_CB_PAIRS && std::is_same_v<T, at::BFloat16>;

using Vec = at::vec::Vectorized<float>;
constexpr int kLanes = Vec::size();
constexpr int kRows = 6;                                  // rows of a block whose sums stay in registers,
constexpr int kColumns = (kLanes >= 16 || kLanes == 4) ? 4 : 2;  // and its columns, in vectors: 32 registers, or 16
constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// `count` elements as floats.
inline void to_float(const float* from, float* to, int64_t count) { std::memcpy(to, from, count * sizeof(float)); }

template <typename T>
inline void to_float(const T* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Vec wide;
    at::vec::load_to_float<T>(from + i, wide);
    wide.store(to + i);
  }
  for (; i < count; ++i) to[i] = static_cast<float>(from[i]);
}

// exp to about one unit in the last place; exactly 1 at 0, and exactly 0 at -infinity.
inline Vec exponential(Vec x) {
#if defined(CPU_CAPABILITY_AVX512)
  // Cephes' expf: x = n ln 2 + r, a polynomial in r, times 2^n.
  const __m512 v = at::vec::maximum(x, Vec(-110.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(v, _mm512_set1_ps(1.44269504088896341f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), v);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
#else
  return x.exp();
#endif
}

inline float sum_of(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, x);
}

inline float maximum_of(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, x);
}

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
#if defined(CPU_CAPABILITY_AVX512)
// 128 bits of each fourth row from the i-th, side by side.
inline __m512i every_fourth(const void* const* rows, int i, int64_t byte) {
  const auto load = [&](int row) { return _mm_loadu_si128((const __m128i*)((const char*)rows[row] + byte)); };
  __m512i v = _mm512_castsi128_si512(load(i));
  v = _mm512_inserti32x4(v, load(4 + i), 1);
  v = _mm512_inserti32x4(v, load(8 + i), 2);
  return _mm512_inserti32x4(v, load(12 + i), 3);
}
inline __m512i low32(__m512i a, __m512i b) { return _mm512_unpacklo_epi32(a, b); }
inline __m512i high32(__m512i a, __m512i b) { return _mm512_unpackhi_epi32(a, b); }
inline __m512i low64(__m512i a, __m512i b) { return _mm512_unpacklo_epi64(a, b); }
inline __m512i high64(__m512i a, __m512i b) { return _mm512_unpackhi_epi64(a, b); }
inline void put(float* to, __m512i bits) { _mm512_storeu_si512(to, bits); }
inline __m512i low_bfloat16(__m512i pair) { return _mm512_slli_epi32(pair, 16); }
inline __m512i high_bfloat16(__m512i pair) { return _mm512_and_si512(pair, _mm512_set1_epi32(0xffff0000)); }
#else
inline __m256i every_fourth(const void* const* rows, int i, int64_t byte) {
  const auto load = [&](int row) { return _mm_loadu_si128((const __m128i*)((const char*)rows[row] + byte)); };
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load(i)), load(4 + i), 1);
}
inline __m256i low32(__m256i a, __m256i b) { return _mm256_unpacklo_epi32(a, b); }
inline __m256i high32(__m256i a, __m256i b) { return _mm256_unpackhi_epi32(a, b); }
inline __m256i low64(__m256i a, __m256i b) { return _mm256_unpacklo_epi64(a, b); }
inline __m256i high64(__m256i a, __m256i b) { return _mm256_unpackhi_epi64(a, b); }
inline void put(float* to, __m256i bits) { _mm256_storeu_si256((__m256i*)to, bits); }
inline __m256i low_bfloat16(__m256i pair) { return _mm256_slli_epi32(pair, 16); }
inline __m256i high_bfloat16(__m256i pair) { return _mm256_and_si256(pair, _mm256_set1_epi32(0xffff0000)); }
#endif

// The loops below call `between` once a step: there the caller asks for memory that it will need later.

#if defined(CPU_CAPABILITY_AVX512)
// 64 bytes of sixteen rows, turned: word w of every row to to[w * stride].
template <typename T, typename F>
inline void transpose_lines(const T* const* rows, int64_t column, float* to, int64_t stride, F&& between) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    const __m512i even = _mm512_loadu_si512(rows[i] + column), odd = _mm512_loadu_si512(rows[i + 1] + column);
    a[i] = low32(even, odd), a[i + 1] = high32(even, odd);
  }
  between();
  // b[4 g + j]: words j, j + 4, j + 8 and j + 12 of rows 4 g to 4 g + 3, four to a lane.
#pragma GCC unroll 4
  for (int g = 0; g < 16; g += 4) {
    b[g] = low64(a[g], a[g + 2]), b[g + 1] = high64(a[g], a[g + 2]);
    b[g + 2] = low64(a[g + 1], a[g + 3]), b[g + 3] = high64(a[g + 1], a[g + 3]);
  }
  between();
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i even = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88), odd = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd);
    const __m512i other_even = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
    const __m512i other_odd = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
    put(to + j * stride, _mm512_shuffle_i32x4(even, other_even, 0x88));
    put(to + (4 + j) * stride, _mm512_shuffle_i32x4(odd, other_odd, 0x88));
    put(to + (8 + j) * stride, _mm512_shuffle_i32x4(even, other_even, 0xdd));
    put(to + (12 + j) * stride, _mm512_shuffle_i32x4(odd, other_odd, 0xdd));
  }
  between();
  between();
}
#endif

// Columns of kLanes rows, 16 bytes of each row at a time: four words of every row, or four pairs of bfloat16, taken apart unless
// they are to stay `together`.
template <typename T, bool together, typename F>
inline int64_t transpose_words(const T* const* rows, float* to, int64_t stride, int64_t size, F&& between) {
  constexpr int64_t kStep = 16 / sizeof(T), kPerWord = 4 / sizeof(T);
  int64_t column = 0;
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<T, float> || together)
    for (; column + 4 * kStep <= size; column += 4 * kStep)
      transpose_lines(rows, column, to + column / kPerWord * stride, stride, between);
#endif
  for (; column + kStep <= size; column += kStep) {
    between();
    const auto pointers = reinterpret_cast<const void* const*>(rows);
    const auto a = every_fourth(pointers, 0, column * sizeof(T)), b = every_fourth(pointers, 1, column * sizeof(T));
    const auto c = every_fourth(pointers, 2, column * sizeof(T)), d = every_fourth(pointers, 3, column * sizeof(T));
    const auto ab = low32(a, b), AB = high32(a, b), cd = low32(c, d), CD = high32(c, d);
    const decltype(ab) words[] = {low64(ab, cd), high64(ab, cd), low64(AB, CD), high64(AB, CD)};
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<T, float> || together) {
        put(to + (column / kPerWord + i) * stride, words[i]);
      } else {
        float* at = to + (column + i * kPerWord) * stride;
        put(at, low_bfloat16(words[i]));
        put(at + stride, high_bfloat16(words[i]));
      }
    }
  }
  return column;
}
#else
template <typename T, bool together, typename F>
inline int64_t transpose_words(const T* const*, float*, int64_t, int64_t, F&&) { return 0; }
#endif

// to[column * stride + i] = rows[i][column], for kLanes rows.
template <typename T, typename F>
inline void transpose(const T* const* rows, float* to, int64_t stride, int64_t size, F&& between) {
  int64_t column = 0;
  if constexpr (!std::is_same_v<T, at::Half>) column = transpose_words<T, false>(rows, to, stride, size, between);
  for (; column < size; ++column)
    for (int i = 0; i < kLanes; ++i) to[column * stride + i] = static_cast<float>(rows[i][column]);
}

#if HF_CB_PAIRS
inline float pair_of(at::BFloat16 low, at::BFloat16 high) {
  return c10::bit_cast<float>(uint32_t(low.x) | uint32_t(high.x) << 16);
}

// The same by pairs: to[pair * stride + i], for (size + 1) / 2 pairs of each row; the last pair of an odd size has a zero.
template <typename F>
inline void transpose_pairs(const at::BFloat16* const* rows, float* to, int64_t stride, int64_t size, F&& between) {
  int64_t column = transpose_words<at::BFloat16, true>(rows, to, stride, size, between);
  for (; column < size; column += 2)
    for (int i = 0; i < kLanes; ++i)
      to[column / 2 * stride + i] = pair_of(rows[i][column], column + 1 < size ? rows[i][column + 1] : at::BFloat16(0));
}

// Two rows of `count` as one of pairs, in whole vectors.
inline void interleave(const at::BFloat16* a, const at::BFloat16* b, float* to, int64_t count) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
                                       35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    const __m512i x = _mm512_loadu_si512(a + i), y = _mm512_loadu_si512(b + i);
    put(to + i, _mm512_permutex2var_epi16(x, low, y));
    put(to + i + kLanes, _mm512_permutex2var_epi16(x, high, y));
  }
  if (i < count) {
    const __mmask32 mask = (1u << (count - i)) - 1;
    const __m512i x = _mm512_maskz_loadu_epi16(mask, a + i), y = _mm512_maskz_loadu_epi16(mask, b + i);
    put(to + i, _mm512_permutex2var_epi16(x, low, y));
    if (count - i > kLanes) put(to + i + kLanes, _mm512_permutex2var_epi16(x, high, y));
  }
}

// kLanes floats to half as many words.
inline void store_pairs(Vec x, float* to) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x)); }
#endif

// a * b + sum, for floats or for pairs.
template <bool pairs>
inline Vec multiply_add(float a, Vec b, Vec sum) {
#if HF_CB_PAIRS
  if constexpr (pairs)
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(c10::bit_cast<int32_t>(a)), (__m512bh)_mm512_castps_si512(b));
#endif
  return at::vec::fmadd(Vec(a), b, sum);
}

// c[R, C vectors] (+)= a[R, first:last] b[first:last, C vectors]; row k of b starts at b[k] + column.
template <bool pairs, int R, int C, typename F>
inline void multiply_block(const float* a, int64_t a_stride, const float* const* b, int64_t column, int first, int last,
                           float* c, int64_t c_stride, bool add, F&& between) {
  Vec sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) sums[r][j] = add ? Vec::loadu(c + r * c_stride + j * kLanes) : Vec(0.0f);
  for (int k = first; k < last; ++k) {
    between();
    Vec row[C];
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) row[j] = Vec::loadu(b[k] + column + j * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) sums[r][j] = multiply_add<pairs>(a[r * a_stride + k], row[j], sums[r][j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) sums[r][j].store(c + r * c_stride + j * kLanes);
}

template <bool pairs, int R, typename F>
inline void multiply_rows(const float* a, int64_t a_stride, const float* const* b, int64_t begin, int64_t end, int first,
                          int last, float* c, int64_t c_stride, bool add, F&& between) {
  int64_t column = begin;
  for (; column + kColumns * kLanes <= end; column += kColumns * kLanes)
    multiply_block<pairs, R, kColumns>(a, a_stride, b, column, first, last, c + column, c_stride, add, between);
  for (; column < end; column += kLanes)
    multiply_block<pairs, R, 1>(a, a_stride, b, column, first, last, c + column, c_stride, add, between);
}

// c[rows <= kRows, begin:end] (+)= a[rows, first:last] b[first:last, begin:end]; begin and end in whole vectors. With `pairs`, what
// first and last count are pairs, in a and in b.
template <bool pairs, typename F>
inline void multiply(int rows, const float* a, int64_t a_stride, const float* const* b, int64_t begin, int64_t end,
                     int first, int last, float* c, int64_t c_stride, bool add, F&& between) {
  static_assert(kRows == 6);
  switch (rows) {
    case 1: return multiply_rows<pairs, 1>(a, a_stride, b, begin, end, first, last, c, c_stride, add, between);
    case 2: return multiply_rows<pairs, 2>(a, a_stride, b, begin, end, first, last, c, c_stride, add, between);
    case 3: return multiply_rows<pairs, 3>(a, a_stride, b, begin, end, first, last, c, c_stride, add, between);
    case 4: return multiply_rows<pairs, 4>(a, a_stride, b, begin, end, first, last, c, c_stride, add, between);
    case 5: return multiply_rows<pairs, 5>(a, a_stride, b, begin, end, first, last, c, c_stride, add, between);
    default: return multiply_rows<pairs, 6>(a, a_stride, b, begin, end, first, last, c, c_stride, add, between);
  }
}

// Memory that will be read next, asked for a few lines at a time between other work: a core waits for no more than some twenty
// lines at once, and a burst of more would stop it.
class Ahead {
 public:
  // Rows of `bytes`, at base + at[first:last] elements.
  void add(const void* base, int64_t element, const int64_t* at, int first, int last, int64_t bytes) {
    streams_[count_++] = {static_cast<const char*>(base), at, element, bytes, first, last};
    lines_ += (bytes + 63) / 64 * (last - first);
  }
  void spread(int64_t steps) { per_step_ = int((lines_ + steps - 1) / steps); }
  void operator()() {
    for (int64_t i = std::min<int64_t>(per_step_, lines_); i > 0; --i) {
      Stream& stream = streams_[now_];
      __builtin_prefetch(stream.base + stream.at[stream.row] * stream.element + byte_, 0, 2);
      --lines_;
      byte_ += 64;
      if (byte_ < stream.bytes) continue;
      byte_ = 0;
      if (++stream.row == stream.last) ++now_;
    }
  }

 private:
  struct Stream {
    const char* base;
    const int64_t* at;
    int64_t element, bytes;
    int row, last;
  };
  Stream streams_[2];
  int64_t lines_ = 0, byte_ = 0;
  int per_step_ = 0, count_ = 0, now_ = 0;
};

}  // namespace hf_cb
