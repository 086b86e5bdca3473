// torch.ops.hf_cb.best: greedy decoding, over logits of any dtype as they are; see runtime/sampler.py.
#include "linear.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>

namespace hf_cb {
namespace {

using at::Tensor;

// The largest of `count` numbers; NaN, if there is one.
template <typename T>
float largest(const T* x, int64_t count) {
  Vec a, b, most(-kInfinity), other(-kInfinity);
  int64_t i = 0;
  for (; i + kPanel <= count; i += kPanel) {
    load_pair(x + i, a, b);
    most = at::vec::maximum(most, a), other = at::vec::maximum(other, b);
  }
  float found = maximum_of(at::vec::maximum(most, other));
  for (; i < count; ++i) {
    const float own = static_cast<float>(x[i]);
    if (own > found || std::isnan(own)) found = own;
    if (std::isnan(found)) break;
  }
  return found;
}

// The first of the largest numbers, or of those that are none.
template <typename T>
int64_t best(const T* x, int64_t n, bool& has_nan) {
  constexpr int64_t kStretch = 1024;  // of which one is gone through twice
  float most = -kInfinity;
  int64_t at = 0;
  for (int64_t i = 0; i < n && !std::isnan(most); i += kStretch) {
    const float own = largest(x + i, std::min(kStretch, n - i));
    if (own > most || std::isnan(own)) most = own, at = i;
  }
  has_nan = std::isnan(most);
  while (at < n - 1 && !(has_nan ? std::isnan(static_cast<float>(x[at])) : static_cast<float>(x[at]) == most)) ++at;
  return at;
}

// logits [n, vocab] -> the first best token of each row [n] int64, and whether it has a NaN [n] bool.
std::tuple<Tensor, Tensor> best_of_rows(const Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "logits: takes [n, vocab]");
  const Tensor own = logits.contiguous();
  const int64_t rows = own.size(0), vocab = own.size(1);
  Tensor tokens = at::empty({rows}, at::kLong), has_nan = at::empty({rows}, at::kBool);
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const T* x = own.const_data_ptr<T>();
    int64_t* token = tokens.mutable_data_ptr<int64_t>();
    bool* nan = has_nan.mutable_data_ptr<bool>();
    at::parallel_for(0, rows, 1 + (1 << 17) / vocab, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) token[i] = best(x + i * vocab, vocab, nan[i]);
    });
  };
  switch (own.scalar_type()) {
    case at::kFloat: run(float()); break;
    case at::kBFloat16: run(at::BFloat16()); break;
    case at::kHalf: run(at::Half()); break;
    default: TORCH_CHECK(false, "logits: takes float32, bfloat16 or float16, not ", own.scalar_type());
  }
  return {tokens, has_nan};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(hf_cb, library) { library.def("best(Tensor logits) -> (Tensor, Tensor)"); }
TORCH_LIBRARY_IMPL(hf_cb, CPU, library) { library.impl("best", best_of_rows); }

}  // namespace hf_cb
