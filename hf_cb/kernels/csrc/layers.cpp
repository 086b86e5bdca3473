// torch.ops.hf_cb: what layers are made of besides attention, for CPUs; see hf/fast/packing.py and hf/fast/fusing.py.
#include "attend.h"
#include "pointwise.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace hf_cb {
namespace {

using at::Tensor;

// f(T()) with the element type of `tensor`.
template <typename F>
auto with_type(const Tensor& tensor, const char* name, F&& f) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return f(float());
    case at::kBFloat16: return f(at::BFloat16());
    case at::kHalf: return f(at::Half());
    default: TORCH_CHECK(false, name, ": takes float32, bfloat16 or float16, not ", tensor.scalar_type());
  }
}

// At least one, of zeros where there is no depth, so that even then biases go where they belong.
int64_t steps_of(int64_t k, int64_t depth) { return std::max<int64_t>(1, (k + depth - 1) / depth); }

// [N, K] -> [panels, steps, kPanel, kDepth], with zeros for the columns and the depth that are not there.
Tensor pack(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "weight: takes a contiguous [N, K]");
  return with_type(weight, "weight", [&](auto zero) {
    using T = decltype(zero);
    constexpr int64_t depth = Step<T>::kDepth;
    const int64_t n = weight.size(0), k = weight.size(1), steps = steps_of(k, depth), panels = (n + kPanel - 1) / kPanel;
    Tensor packed = at::zeros({panels, steps, kPanel, depth}, weight.options());
    const T* from = weight.const_data_ptr<T>();
    T* to = packed.mutable_data_ptr<T>();
    at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel) {
        const int64_t columns = std::min<int64_t>(kPanel, n - panel * kPanel);
        for (int64_t step = 0; step < steps; ++step)
          for (int64_t column = 0; column < columns; ++column)
            for (int64_t i = 0; i < std::min(depth, k - step * depth); ++i)
              to[((panel * steps + step) * kPanel + column) * depth + i] = from[(panel * kPanel + column) * k + step * depth + i];
      }
    });
    return packed;
  });
}

Tensor product(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t width, bool matrix,
               int64_t activation = 0, bool swapped = false, const Tensor* residual = nullptr) {
  const auto kind = static_cast<Activation>(activation);
  TORCH_CHECK(x.dim() >= 1 && packed.dim() == 4 && packed.scalar_type() == x.scalar_type() && packed.is_contiguous(),
              "packed: takes what `pack` made, of the dtype of x");
  TORCH_CHECK(activation >= 0 && activation <= int64_t(Activation::kGeluTanh), "activation: takes 0 to 3");
  const int64_t panels = kind == Activation::kNone ? packed.size(0) : packed.size(0) / 2;
  TORCH_CHECK(width > (panels - 1) * kPanel && width <= panels * kPanel &&
                  (kind == Activation::kNone || (width % kPanel == 0 && packed.size(0) % 2 == 0)),
              "width: takes the number of columns that were packed");
  if (bias)
    TORCH_CHECK(bias->scalar_type() == at::kFloat && bias->is_contiguous() && bias->numel() == packed.size(0) * kPanel,
                "bias: takes float32, one for each packed column");
  auto shape = x.sizes().vec();
  shape.back() = width;
  const int64_t rows = c10::multiply_integers(shape.begin(), shape.end() - 1), k = x.size(-1);
  const Tensor added = residual ? residual->contiguous() : Tensor();
  if (residual)
    TORCH_CHECK(added.scalar_type() == x.scalar_type() && added.dim() >= 1 && added.size(-1) == width &&
                    added.numel() == rows * width,
                "residual: takes rows like the result's");
  return with_type(x, "x", [&](auto zero) {
    using T = decltype(zero);
    using Factor = typename Step<T>::Factor;
    constexpr int64_t depth = Step<T>::kDepth;
    const int64_t steps = packed.size(1);
    TORCH_CHECK(packed.size(2) == kPanel && packed.size(3) == depth, "packed: takes what `pack` made");
    TORCH_CHECK(steps_of(k, depth) == steps, "x: takes rows as long as the weight is deep");
    Tensor out = at::empty(shape, x.options());
    if (!rows) return out;
    Tensor input = x.contiguous();
    const bool crooked = reinterpret_cast<uintptr_t>(input.const_data_ptr()) % alignof(Factor);
    if (k < steps * depth || crooked) {  // the last step is filled up with zeros, and pairs lie where pairs do
      Tensor full = at::zeros({rows, steps * depth}, x.options());
      full.narrow(1, 0, k).copy_(input.view({rows, k}));
      input = full;
    }
    if constexpr (depth == 1) input = input.to(at::kFloat);
    multiply(Product<T>{static_cast<const Factor*>(input.const_data_ptr()), rows, steps, packed.const_data_ptr<T>(),
                        packed.size(0), bias ? bias->const_data_ptr<float>() : nullptr,
                        residual ? added.const_data_ptr<T>() : nullptr, out.mutable_data_ptr<T>(), width, kind, swapped,
                        matrix && kHasMatrix<T>});
    return out;
  });
}

Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t width, bool matrix) {
  return product(x, packed, bias, width, matrix);
}

Tensor gated(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t width, bool matrix,
             int64_t activation, bool swapped) {
  TORCH_CHECK(activation > 0, "activation: takes 1 to 3");
  return product(x, packed, bias, width, matrix, activation, swapped);
}

Tensor rms_norm_op(const Tensor& x, const Tensor& weight, double eps, double offset, bool late) {
  const int64_t size = weight.numel();
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) == size && weight.scalar_type() == x.scalar_type(),
              "weight: takes as many numbers as a row of x has, of its dtype");
  const Tensor input = x.contiguous(), own = weight.contiguous();
  Tensor out = at::empty(x.sizes(), x.options());
  with_type(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T *from = input.const_data_ptr<T>(), *factors = own.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    at::parallel_for(0, size ? x.numel() / size : 0, 1 + (1 << 15) / std::max<int64_t>(1, size), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) rms_norm(from + i * size, factors, to + i * size, size, eps, offset, late);
    });
    return 0;
  });
  return out;
}

// Turns the first `heads` heads of each row of x [..., T, H * D] in place, by cos and sin [..., T, D].
void rotate_op(Tensor x, const Tensor& cos, const Tensor& sin, int64_t heads) {
  const int64_t size = cos.size(-1), tokens = size ? cos.numel() / size : 0, width = x.size(-1);
  TORCH_CHECK(x.is_contiguous() && x.numel() == tokens * width && size % 2 == 0, "x: takes contiguous [T, H * D], D even");
  TORCH_CHECK(heads >= 0 && (size == 0 || heads <= width / size), "heads: takes at most as many as x has");
  for (const Tensor* turn : {&cos, &sin})
    TORCH_CHECK(turn->is_contiguous() && turn->sizes() == cos.sizes() && turn->scalar_type() == x.scalar_type(),
                "cos, sin: takes contiguous [T, D] of the dtype of x");
  with_type(x, "x", [&](auto zero) {
    using T = decltype(zero);
    T* data = x.mutable_data_ptr<T>();
    const T *c = cos.const_data_ptr<T>(), *s = sin.const_data_ptr<T>();
    at::parallel_for(0, tokens, 1 + (1 << 15) / std::max<int64_t>(1, heads * size), [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token)
        for (int64_t head = 0; head < heads; ++head)
          rotate(data + token * width + head * size, c + token * size, s + token * size, size);
    });
    return 0;
  });
}

// A decoder layer up to its attention: norm, then queries, keys and values side by side, then their turns.
Tensor before_attention(const Tensor& x, const Tensor& norm, double eps, double offset, bool late, const Tensor& packed,
                        const std::optional<Tensor>& bias, int64_t width, bool matrix, const Tensor& cos, const Tensor& sin,
                        int64_t heads) {
  Tensor joined = product(rms_norm_op(x, norm, eps, offset, late), packed, bias, width, matrix);
  rotate_op(joined, cos, sin, heads);
  return joined;
}

// The rest of it: the output's product, added to x, and what the gated MLP makes of that, added again.
Tensor after_attention(const Tensor& attended, const Tensor& x, const Tensor& out, const std::optional<Tensor>& out_bias,
                       const Tensor& norm, double eps, double offset, bool late, const Tensor& inner,
                       const std::optional<Tensor>& inner_bias, int64_t inner_width, int64_t activation, bool swapped,
                       const Tensor& down, const std::optional<Tensor>& down_bias, bool matrix) {
  const int64_t width = x.size(-1);
  const Tensor before = x.contiguous();
  const Tensor middle = product(attended, out, out_bias, width, matrix, 0, false, &before);
  const Tensor wide =
      product(rms_norm_op(middle, norm, eps, offset, late), inner, inner_bias, inner_width, matrix, activation, swapped);
  return product(wide, down, down_bias, width, matrix, 0, false, &middle);
}

// Decoder layers one after another, which differ in their numbers alone: of each two `norms`, the packed `weights` and `biases` of
// its four products, its `caches` of keys and of values. `wanted`: the tokens whose results anybody asks the last one for; for the
// others it gives zeros.
Tensor layers(const Tensor& x, const Tensor& cos, const Tensor& sin, at::TensorList norms, double eps, double offset, bool late,
              at::TensorList weights, const c10::List<std::optional<Tensor>>& biases, int64_t joined_width, int64_t inner_width,
              bool matrix, int64_t activation, bool swapped, int64_t heads, at::TensorList caches, const Tensor& slots,
              const Tensor& table, const Tensor& pieces, const Tensor& merges, const Tensor& partials, double scale,
              std::optional<int64_t> window, std::optional<int64_t> chunk, std::optional<double> softcap,
              const std::optional<Tensor>& wanted) {
  const int64_t count = norms.size() / 2, size = cos.size(-1), tokens = x.numel() / std::max<int64_t>(1, x.size(-1));
  TORCH_CHECK(count > 0 && int64_t(norms.size()) == 2 * count && int64_t(weights.size()) == 4 * count && int64_t(biases.size()) == 4 * count &&
                  int64_t(caches.size()) == 2 * count,
              "norms, weights, biases, caches: takes 2, 4, 4 and 2 for each layer, of which there are some");
  TORCH_CHECK(size > 0 && joined_width % size == 0 && heads > 0 && (joined_width / size - heads) % 2 == 0 &&
                  joined_width / size > heads,
              "joined_width: takes heads of queries, and as many of keys as of values");
  const int64_t kv_heads = (joined_width / size - heads) / 2;
  Tensor hidden = x;
  for (int64_t i = 0; i < count; ++i) {
    const at::TensorList weight = weights.slice(4 * i, 4);
    const auto bias = [&](int64_t which) -> std::optional<Tensor> { return biases[4 * i + which]; };
    const Tensor joined = before_attention(hidden, norms[2 * i], eps, offset, late, weight[0], bias(0), joined_width, matrix, cos,
                                           sin, heads + kv_heads)
                              .view({tokens, heads + 2 * kv_heads, size});
    const bool known = i > 0 && caches[2 * i].sizes() == caches[0].sizes() && caches[2 * i + 1].sizes() == caches[1].sizes();
    Tensor attended = attend(joined.narrow(1, 0, heads), joined.narrow(1, heads, kv_heads),
                             joined.narrow(1, heads + kv_heads, kv_heads), caches[2 * i], caches[2 * i + 1], slots, table, pieces,
                             merges, partials, std::nullopt, scale, window, chunk, softcap, matrix, known)
                          .view({tokens, heads * size});
    hidden = hidden.reshape({tokens, x.size(-1)});
    const bool last = wanted && i == count - 1;
    if (last) attended = at::index_select(attended, 0, *wanted), hidden = at::index_select(hidden, 0, *wanted);
    hidden = after_attention(attended, hidden, weight[1], bias(1), norms[2 * i + 1], eps, offset, late, weight[2], bias(2),
                             inner_width, activation, swapped, weight[3], bias(3), matrix);
    if (last) hidden = at::zeros({tokens, x.size(-1)}, x.options()).index_copy_(0, *wanted, hidden);
  }
  return hidden.view(x.sizes());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(hf_cb, library) {
  library.def("pack(Tensor weight) -> Tensor");
  // Columns of a panel; 0 where no vector instructions were compiled in that would make products of our own worth while.
  library.def("panel() -> int", [] {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
    return int64_t(kPanel);
#else
    return int64_t(0);
#endif
  });
  library.def("linear(Tensor x, Tensor packed, Tensor? bias, int width, bool matrix) -> Tensor");
  library.def("gated(Tensor x, Tensor packed, Tensor? bias, int width, bool matrix, int activation, bool swapped) -> Tensor");
  library.def(
      "before_attention(Tensor x, Tensor norm, float eps, float offset, bool late, Tensor packed, Tensor? bias, int width, "
      "bool matrix, Tensor cos, Tensor sin, int heads) -> Tensor");
  library.def(
      "after_attention(Tensor attended, Tensor x, Tensor out, Tensor? out_bias, Tensor norm, float eps, float offset, bool late, "
      "Tensor inner, Tensor? inner_bias, int inner_width, int activation, bool swapped, Tensor down, Tensor? down_bias, "
      "bool matrix) -> Tensor");
  library.def(
      "layers(Tensor x, Tensor cos, Tensor sin, Tensor[] norms, float eps, float offset, bool late, Tensor[] weights, "
      "Tensor?[] biases, int joined_width, int inner_width, bool matrix, int activation, bool swapped, int heads, "
      "Tensor(a!)[] caches, Tensor slots, Tensor table, Tensor pieces, Tensor merges, Tensor partials, float scale, int? window, "
      "int? chunk, float? softcap, Tensor? wanted) -> Tensor");
  library.def("rms_norm(Tensor x, Tensor weight, float eps, float offset, bool late) -> Tensor");
  library.def("rotate(Tensor(a!) x, Tensor cos, Tensor sin, int heads) -> ()");
}

TORCH_LIBRARY_IMPL(hf_cb, CPU, library) {
  library.impl("pack", pack);
  library.impl("linear", linear);
  library.impl("gated", gated);
  library.impl("before_attention", before_attention);
  library.impl("after_attention", after_attention);
  library.impl("layers", layers);
  library.impl("rms_norm", rms_norm_op);
  library.impl("rotate", rotate_op);
}

}  // namespace hf_cb
