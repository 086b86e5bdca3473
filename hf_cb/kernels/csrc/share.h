// Work that is shared out among torch's threads. What a part gives must not depend on who computes it, or beside what.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

namespace hf_cb {

// run(i, next) for each of `count` parts, in turns: whoever is slowed down takes fewer. `next`: what the same thread runs then, or
// `count` and more.
template <typename F>
void share(int64_t count, const F& run) {
  const int64_t threads = std::min<int64_t>(count, at::get_num_threads());
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count;) {
      const int64_t then = next++;
      run(i, then);
      i = then;
    }
  });
}

// run(begin, end) for one stretch of the `count` parts a thread, which it reads as one stream. `grain`: parts that are worth
// another thread.
template <typename F>
void share_stretches(int64_t count, int64_t grain, const F& run) {
  const int64_t threads = std::min<int64_t>((count + grain - 1) / grain, at::get_num_threads());
  if (threads <= 1) return run(0, count);
  at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) run(count * i / threads, count * (i + 1) / threads);
  });
}

}  // namespace hf_cb
