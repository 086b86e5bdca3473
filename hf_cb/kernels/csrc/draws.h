// Draws of one token by probabilities, with the numbers of torch's CPU generator; see runtime/draws.py.
#pragma once

#include <cmath>
#include <cstdint>

namespace hf_cb {

// The state of MT19937 (Matsumoto and Nishimura, 1998): 624 words, then how many of them have been used.
constexpr int kWords = 624;

inline uint32_t twist(uint32_t high, uint32_t low, uint32_t far) {
  const uint32_t y = (high & 0x80000000u) | (low & 0x7fffffffu);
  return far ^ (y >> 1) ^ (-(y & 1u) & 0x9908b0dfu);
}

inline void refill(uint32_t* words) {
  for (int i = 0; i < 227; ++i) words[i] = twist(words[i], words[i + 1], words[i + 397]);
  for (int i = 227; i < 623; ++i) words[i] = twist(words[i], words[i + 1], words[i - 227]);
  words[623] = twist(words[623], words[0], words[396]);
}

inline uint32_t temper(uint32_t y) {
  y ^= y >> 11;
  y ^= (y << 7) & 0x9d2c5680u;
  y ^= (y << 15) & 0xefc60000u;
  return y ^ (y >> 18);
}

// The race of torch.multinomial: token i's time is exponential with rate p[i]; who is first wins. Two words make the 53 bits of a
// time. Only times that can win are worked out: a time is no shorter than its uniform number. Returns -1 for what are no
// probabilities: something infinite or not a number, or nothing above zero.
inline int64_t draw(uint32_t* state, const float* p, int64_t n) {
  constexpr int kLanes = 16;
  float most = 0;
  int sound = 1;
  for (int64_t i = 0; i < n; ++i) {
    sound &= int(p[i] >= 0) & int(p[i] <= 3.4028234e38f);
    most = p[i] > most ? p[i] : most;
  }
  if (!sound || !(most > 0)) return -1;

  int64_t best = -1;
  float speed = 0;  // of the best so far: p / time
  uint32_t fresh[kWords];
  for (int64_t start = 0; start < n;) {
    if (state[kWords] >= kWords) {
      refill(state);
      state[kWords] = 0;
    }
    const uint32_t used = state[kWords];
    const int64_t count = std::min<int64_t>((kWords - used) / 2, n - start);
    for (int64_t i = 0; i < 2 * count; ++i) fresh[i] = temper(state[used + i]);
    state[kWords] = used + uint32_t(2 * count);
    for (int64_t first = 0; first < count; first += kLanes) {
      const int64_t last = std::min(first + kLanes, count);
      const float bound = speed * float(0x1p-21 * (1 - 1e-5));  // the slack is far above a quotient's rounding
      int can_win = 0;
      for (int64_t i = first; i < last; ++i)
        can_win |= int(p[start + i] > bound * float(int32_t(fresh[2 * i] & 0x1fffff)));
      if (!can_win) continue;
      for (int64_t i = first; i < last; ++i) {
        const float own = p[start + i];
        const uint64_t word = uint64_t(fresh[2 * i] & 0x1fffff) << 32 | fresh[2 * i + 1];
        if (!(own > speed * float(0x1p-21 * (1 - 1e-5)) * float(int32_t(word >> 32)))) continue;
        const float time = float(-std::log1p(double(word) * -0x1p-53));
        if (own / time > speed) {  // a time of zero wins
          speed = own / time;
          best = start + i;
        }
      }
    }
    start += count;
  }
  if (best >= 0) return best;
  for (int64_t i = 0; i < n; ++i)  // all too small for a quotient
    if (p[i] == most) return i;
  return -1;
}

}  // namespace hf_cb
