// What lies between the products of a layer: root-mean-square norms and rotary positions, each in one pass. They round where
// transformers' own code does, so that half precision has its bits.
#pragma once

#include "linear.h"

namespace hf_cb {

// x / sqrt(mean(x^2) + eps) * (weight + offset). `late`: rounded after the product with the weight alone, else before it, too.
template <typename T>
inline void rms_norm(const T* x, const T* weight, T* out, int64_t size, float eps, float offset, bool late) {
  Vec a, b, total(0.0f), other(0.0f);
  for (int64_t i = 0; i < size; i += kPanel) {
    load_pair(x + i, size - i, a, b);
    total = at::vec::fmadd(a, a, total), other = at::vec::fmadd(b, b, other);
  }
  const Vec factor(1.0f / std::sqrt(sum_of(total + other) / float(size) + eps));
  Vec wa, wb;
  for (int64_t i = 0; i < size; i += kPanel) {
    load_pair(x + i, size - i, a, b), load_pair(weight + i, size - i, wa, wb);
    a = a * factor, b = b * factor;
    if (!late) round_to<T>(a, b);
    store_panel(a * (wa + Vec(offset)), b * (wb + Vec(offset)), out + i, size - i);
  }
}

// x * cos + (-right half, left half) * sin, for one head in place.
template <typename T>
inline void rotate(T* x, const T* cos, const T* sin, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i += kPanel) {
    const int64_t count = half - i;
    Vec l[2], r[2], c[2], s[2];
    const auto turn = [&](int64_t at, Vec* own, Vec* other, bool negative, Vec* to) {
      load_pair(cos + at, count, c[0], c[1]), load_pair(sin + at, count, s[0], s[1]);
      for (int j = 0; j < 2; ++j) to[j] = own[j] * c[j], s[j] = (negative ? other[j].neg() : other[j]) * s[j];
      round_to<T>(to[0], to[1]), round_to<T>(s[0], s[1]);
      for (int j = 0; j < 2; ++j) to[j] = to[j] + s[j];
    };
    load_pair(x + i, count, l[0], l[1]), load_pair(x + half + i, count, r[0], r[1]);
    Vec left[2], right[2];
    turn(i, l, r, true, left), turn(half + i, r, l, false, right);
    store_panel(left[0], left[1], x + i, count), store_panel(right[0], right[1], x + half + i, count);
  }
}

}  // namespace hf_cb
