// Work that is shared out among torch's threads. Whoever is slowed down takes less; what a part gives must not depend on who
// computes it, or beside what.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

namespace hf_cb {

// run(i, next) for each of `count` parts, in turns; `next`: what the same thread runs then, or `count` and more.
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

// run(begin, end) for stretches of `count` parts: long ones first, which are read as one stream, then shorter ones, so that all
// threads end together. `grain`: parts that are worth another thread.
template <typename F>
void share_stretches(int64_t count, int64_t grain, const F& run) {
  const int64_t threads = std::min<int64_t>((count + grain - 1) / grain, at::get_num_threads());
  if (threads <= 1) return run(0, count);
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t begin = next; begin < count;) {
      const int64_t fair = (count - begin) * 3 / (4 * threads), size = std::min(count - begin, std::max<int64_t>(2, fair / 2 * 2));
      if (!next.compare_exchange_weak(begin, begin + size)) continue;
      run(begin, begin + size);
      begin = next;
    }
  });
}

}  // namespace hf_cb
