// Products of many rows by AMX, where there is that: through ATen's door to oneDNN's batch-reduce kernels. What they multiply lies as
// the vectors' pairs do, so that both work on the same copies.
#pragma once

#include <ATen/native/CPUBlas.h>

#include "simd.h"

namespace hf_cb {

constexpr int kMatrixRows = 16, kMostMatrixRows = 32;  // a tile, and two

#ifdef CPUBLAS_BRGEMM_BF16BF16F32
template <typename T>
constexpr bool kHasMatrix = kPairs<T>;

// c[rows, columns] (+)= a[rows, depth] b[depth, columns], all of pairs but c. Strides in pairs, and in floats.
inline void multiply_matrix(int64_t rows, int64_t columns, int64_t depth, const void* a, int64_t a_stride, const void* b,
                            int64_t b_stride, float* c, int64_t c_stride, bool add) {
  at::native::cpublas::brgemm(rows, columns, 2 * depth, 2 * a_stride, b_stride, c_stride, add,
                              static_cast<const at::BFloat16*>(a), static_cast<const at::BFloat16*>(b), c);
}

// A thread must, before it does anything else with tiles.
inline void release_matrix() { at::native::cpublas::brgemm_release(); }
#else
template <typename T>
constexpr bool kHasMatrix = false;
inline void multiply_matrix(int64_t, int64_t, int64_t, const void*, int64_t, const void*, int64_t, float*, int64_t, bool) {}
inline void release_matrix() {}
#endif

// How many of the `left` rows to compute at once by AMX; 0: too few.
inline int64_t matrix_rows(int64_t left) { return left >= kMostMatrixRows ? kMostMatrixRows : left >= kMatrixRows ? kMatrixRows : 0; }

}  // namespace hf_cb
