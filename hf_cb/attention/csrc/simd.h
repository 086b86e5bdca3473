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

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace hf_cb {

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

// c[R, C vectors] (+)= a[R, first:last] b[first:last, C vectors]; row k of b starts at b[k] + column.
template <int R, int C>
inline void multiply_block(const float* a, int64_t a_stride, const float* const* b, int64_t column, int first, int last,
                           float* c, int64_t c_stride, bool add) {
  Vec sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) sums[r][j] = add ? Vec::loadu(c + r * c_stride + j * kLanes) : Vec(0.0f);
  for (int k = first; k < last; ++k) {
    Vec row[C];
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) row[j] = Vec::loadu(b[k] + column + j * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec factor(a[r * a_stride + k]);
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) sums[r][j] = at::vec::fmadd(factor, row[j], sums[r][j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) sums[r][j].store(c + r * c_stride + j * kLanes);
}

template <int R>
inline void multiply_rows(const float* a, int64_t a_stride, const float* const* b, int64_t begin, int64_t end, int first,
                          int last, float* c, int64_t c_stride, bool add) {
  int64_t column = begin;
  for (; column + kColumns * kLanes <= end; column += kColumns * kLanes)
    multiply_block<R, kColumns>(a, a_stride, b, column, first, last, c + column, c_stride, add);
  for (; column < end; column += kLanes)
    multiply_block<R, 1>(a, a_stride, b, column, first, last, c + column, c_stride, add);
}

// c[rows <= kRows, begin:end] (+)= a[rows, first:last] b[first:last, begin:end]; begin and end in whole vectors.
inline void multiply(int rows, const float* a, int64_t a_stride, const float* const* b, int64_t begin, int64_t end,
                     int first, int last, float* c, int64_t c_stride, bool add) {
  static_assert(kRows == 6);
  switch (rows) {
    case 1: return multiply_rows<1>(a, a_stride, b, begin, end, first, last, c, c_stride, add);
    case 2: return multiply_rows<2>(a, a_stride, b, begin, end, first, last, c, c_stride, add);
    case 3: return multiply_rows<3>(a, a_stride, b, begin, end, first, last, c, c_stride, add);
    case 4: return multiply_rows<4>(a, a_stride, b, begin, end, first, last, c, c_stride, add);
    case 5: return multiply_rows<5>(a, a_stride, b, begin, end, first, last, c, c_stride, add);
    default: return multiply_rows<6>(a, a_stride, b, begin, end, first, last, c, c_stride, add);
  }
}

}  // namespace hf_cb
