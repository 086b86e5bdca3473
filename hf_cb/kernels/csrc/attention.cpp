// torch.ops.hf_cb: varlen paged attention for CPUs, `plan` once a step and `attend` once a layer, see attention/native.py; and `draw`,
// see runtime/draws.py. One library, so that there is one build.
#include "attend.h"
#include "draws.h"
#include "share.h"
#include "tile.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace hf_cb {
namespace {

using at::Tensor;

void check_ints(const Tensor& tensor, at::ScalarType type, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == type && tensor.is_contiguous(), name, ": takes a contiguous tensor of ", type);
}

template <typename Record>
void check_records(const Tensor& tensor, const char* name) {
  check_ints(tensor, at::kInt, name);
  TORCH_CHECK(tensor.dim() == 2 && tensor.size(1) * sizeof(int32_t) == sizeof(Record), name, ": takes what `plan` made");
}

template <typename Record>
Tensor as_tensor(const std::vector<Record>& records) {
  constexpr int64_t width = sizeof(Record) / sizeof(int32_t);
  Tensor tensor = at::empty({int64_t(records.size()), width}, at::kInt);
  if (!records.empty()) std::memcpy(tensor.data_ptr(), records.data(), records.size() * sizeof(Record));
  return tensor;
}

std::tuple<Tensor, Tensor, Tensor> plan(const Tensor& starts, const Tensor& key_lens, int64_t heads, int64_t group,
                                        int64_t value_size, std::optional<int64_t> window,
                                        std::optional<int64_t> chunk) {
  check_ints(starts, at::kInt, "starts");
  check_ints(key_lens, at::kInt, "key_lens");
  TORCH_CHECK(starts.numel() == key_lens.numel() + 1, "starts: takes one more than key_lens");
  TORCH_CHECK(heads > 0 && group > 0 && value_size > 0, "heads, group, value_size: takes positive numbers");
  TORCH_CHECK(window.value_or(1) > 0 && chunk.value_or(1) > 0, "window, chunk: takes positive numbers");
  const Plan made = make_plan(starts.const_data_ptr<int32_t>(), key_lens.const_data_ptr<int32_t>(), key_lens.numel(), heads,
                              group, {window, chunk}, at::get_num_threads());
  return {as_tensor(made.pieces), as_tensor(made.merges), at::empty({made.partial_rows, value_size + 2}, at::kFloat)};
}

// cache[slot] = packed[token], for every token.
template <typename T>
void write(const Tensor& packed, Tensor& cache, const int64_t* slots) {
  const int64_t tokens = packed.size(0), heads = packed.size(1), size = packed.size(2), block_size = cache.size(1);
  const T* from = packed.const_data_ptr<T>();
  T* to = cache.mutable_data_ptr<T>();
  const int64_t token_stride = packed.stride(0), head_stride = packed.stride(1);
  const int64_t block_stride = cache.stride(0), slot_stride = cache.stride(1), to_head = cache.stride(2);
  constexpr int64_t kGrain = 32768;  // elements that are worth another thread
  at::parallel_for(0, tokens, 1 + kGrain / (heads * size), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      T* slot = to + slots[token] / block_size * block_stride + slots[token] % block_size * slot_stride;
      for (int64_t head = 0; head < heads; ++head)
        std::memcpy(slot + head * to_head, from + token * token_stride + head * head_stride, size * sizeof(T));
    }
  });
}

template <typename T>
void run(const Call<T>& call, const Tensor& pieces, const Tensor& merges) {
  const auto* piece = reinterpret_cast<const Piece*>(pieces.const_data_ptr<int32_t>());
  const int64_t count = pieces.size(0);
  share(count, [&](int64_t i, int64_t next) {
    static thread_local Scratch scratch;
    PieceRunner<T>(call, piece[i], next < count ? piece + next : nullptr, scratch).run();
  });
  const auto* split = reinterpret_cast<const Merge*>(merges.const_data_ptr<int32_t>());
  share(merges.size(0) * call.heads, [&](int64_t i, int64_t) {
    float sums[kMaxHeadSize];
    const Merge& one = split[i / call.heads];
    for (int64_t row = 0; row < one.queries * call.group; ++row) merge(call, one, i % call.heads, row, sums);
  });
}

void check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache) {
  for (const Tensor* tensor : {&q, &k, &v}) TORCH_CHECK(tensor->dim() == 3 && tensor->stride(2) == 1, "q, k, v: [T, H, D]");
  for (const Tensor* cache : {&k_cache, &v_cache}) TORCH_CHECK(cache->dim() == 4 && cache->stride(3) == 1, "cache");
  for (const Tensor* tensor : {&k, &v, &k_cache, &v_cache})
    TORCH_CHECK(tensor->scalar_type() == q.scalar_type(), "k, v, k_cache, v_cache: takes the dtype of q");
  TORCH_CHECK(k.size(0) == q.size(0) && v.size(0) == q.size(0), "k, v: takes as many tokens as q");
  TORCH_CHECK(k.size(1) > 0 && k.size(2) > 0 && v.size(1) == k.size(1) && v.size(2) > 0, "k, v: takes heads, as many of both");
  TORCH_CHECK(k_cache.sizes().slice(0, 2) == v_cache.sizes().slice(0, 2), "k_cache, v_cache: takes the same slots");
  TORCH_CHECK(k_cache.size(0) > 0 && k_cache.size(1) > 0, "k_cache, v_cache: takes blocks with slots");
  TORCH_CHECK(k.sizes().slice(1) == k_cache.sizes().slice(2) && v.sizes().slice(1) == v_cache.sizes().slice(2),
              "k, v: takes the cache's heads and sizes");
  TORCH_CHECK(q.size(1) % k.size(1) == 0 && q.size(2) == k.size(2), "q: takes the keys' size, and whole groups of heads");
  TORCH_CHECK(q.size(2) <= kMaxHeadSize && v.size(2) <= kMaxHeadSize, "q, v: takes heads of at most ", kMaxHeadSize);
}

}  // namespace

namespace {

template <typename Int>
void check_range(const Tensor& tensor, int64_t limit, const char* name) {
  const Int* values = tensor.const_data_ptr<Int>();
  Int least = 0, most = 0;
  for (int64_t i = 0; i < tensor.numel(); ++i) least = std::min(least, values[i]), most = std::max(most, values[i]);
  TORCH_CHECK(least >= 0 && int64_t(most) < limit, name, ": takes numbers from 0 to ", limit - 1);
}

// What `plan` made for another step, or for other heads, would lead anywhere.
void check_plan(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& table, int64_t block_size, const Tensor& pieces,
                const Tensor& merges, const Tensor& partials) {
  const int64_t tokens = q.size(0), heads = k.size(1), group = q.size(1) / heads, room = partials.size(0);
  const auto* piece = reinterpret_cast<const Piece*>(pieces.const_data_ptr<int32_t>());
  bool sound = true;
  for (int64_t i = 0; i < pieces.size(0); ++i) {
    const Piece& own = piece[i];
    sound &= own.row >= 0 && own.row < table.size(0) && own.token >= 0 && own.queries > 0 &&
             int64_t(own.token) + own.queries <= tokens && own.head_begin >= 0 && own.head_begin < own.head_end &&
             own.head_end <= heads && own.key_begin >= 0 && own.key_begin < own.key_end &&
             own.key_end <= table.size(1) * block_size && own.position >= 0 &&
             (own.partial < 0 || own.partial + heads * own.queries * group <= room);
  }
  const auto* merge = reinterpret_cast<const Merge*>(merges.const_data_ptr<int32_t>());
  for (int64_t i = 0; i < merges.size(0); ++i) {
    const Merge& own = merge[i];
    sound &= own.token >= 0 && own.queries > 0 && int64_t(own.token) + own.queries <= tokens && own.partial >= 0 &&
             own.splits > 0 && own.partial + own.splits * heads * own.queries * group <= room;
  }
  TORCH_CHECK(sound, "pieces, merges, partials: takes what `plan` made for this step and these heads");
  TORCH_CHECK(partials.size(1) == v.size(2) + 2, "partials: takes what `plan` made");
}

}  // namespace

Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, Tensor k_cache, Tensor v_cache, const Tensor& slots,
              const Tensor& table, const Tensor& pieces, const Tensor& merges, const Tensor& partials,
              const std::optional<Tensor>& sinks, double scale, std::optional<int64_t> window,
              std::optional<int64_t> chunk, std::optional<double> softcap, bool matrix, bool known) {
  check(q, k, v, k_cache, v_cache);
  check_ints(slots, at::kLong, "slots");
  check_ints(table, at::kInt, "table");
  TORCH_CHECK(slots.numel() == q.size(0), "slots: takes one for each token");
  TORCH_CHECK(table.dim() == 2, "table: takes [rows, blocks]");
  check_records<Piece>(pieces, "pieces");
  check_records<Merge>(merges, "merges");
  TORCH_CHECK(partials.scalar_type() == at::kFloat && partials.is_contiguous(), "partials: takes what `plan` made");
  TORCH_CHECK(partials.dim() == 2, "partials: takes what `plan` made");
  if (sinks) TORCH_CHECK(sinks->numel() == q.size(1), "sinks: takes one for each head");
  TORCH_CHECK(window.value_or(1) > 0 && chunk.value_or(1) > 0, "window, chunk: takes positive numbers");
  if (!known) {
    check_range<int64_t>(slots, k_cache.size(0) * k_cache.size(1), "slots");
    check_range<int32_t>(table, k_cache.size(0), "table");
    check_plan(q, k, v, table, k_cache.size(1), pieces, merges, partials);
  }
  Tensor out = at::empty({q.size(0), q.size(1), v.size(2)}, q.options());
  const Tensor logits = sinks ? sinks->to(at::kFloat).contiguous() : Tensor();
  const auto serve = [&](auto zero) {
    using T = decltype(zero);
    write<T>(k, k_cache, slots.const_data_ptr<int64_t>());
    write<T>(v, v_cache, slots.const_data_ptr<int64_t>());
    const Call<T> call{q.const_data_ptr<T>(), k_cache.const_data_ptr<T>(), v_cache.const_data_ptr<T>(),
                       out.mutable_data_ptr<T>(), q.stride(0), q.stride(1),
                       k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
                       v_cache.stride(0), v_cache.stride(1), v_cache.stride(2),
                       table.const_data_ptr<int32_t>(), table.size(1), k_cache.size(1),
                       k.size(1), q.size(1) / k.size(1), q.size(2), v.size(2),
                       float(scale), float(softcap.value_or(0.0)), sinks ? logits.const_data_ptr<float>() : nullptr,
                       {window, chunk}, const_cast<float*>(partials.const_data_ptr<float>()), matrix && kHasMatrix<T>};
    run(call, pieces, merges);
  };
  switch (q.scalar_type()) {
    case at::kFloat: serve(float()); break;
    case at::kBFloat16: serve(at::BFloat16()); break;
    case at::kHalf: serve(at::Half()); break;
    default: TORCH_CHECK(false, "q: takes float32, bfloat16 or float16, not ", q.scalar_type());
  }
  return out;
}

namespace {

Tensor attend_op(const Tensor& q, const Tensor& k, const Tensor& v, Tensor k_cache, Tensor v_cache, const Tensor& slots,
                 const Tensor& table, const Tensor& pieces, const Tensor& merges, const Tensor& partials,
                 const std::optional<Tensor>& sinks, double scale, std::optional<int64_t> window, std::optional<int64_t> chunk,
                 std::optional<double> softcap, bool matrix) {
  return attend(q, k, v, k_cache, v_cache, slots, table, pieces, merges, partials, sinks, scale, window, chunk, softcap, matrix, false);
}

// A token for each row of probs [n, vocab], from its own state [625] int32, which moves on.
Tensor draw_all(at::TensorList states, const Tensor& probs) {
  TORCH_CHECK(probs.scalar_type() == at::kFloat && probs.is_contiguous() && probs.dim() == 2 &&
                  probs.size(0) == int64_t(states.size()),
              "probs: takes contiguous float32 [states, vocab]");
  std::vector<uint32_t*> words;
  for (const Tensor& state : states) {
    check_ints(state, at::kInt, "states");
    TORCH_CHECK(state.numel() == kWords + 1, "states: takes ", kWords + 1, " words each");
    words.push_back(reinterpret_cast<uint32_t*>(const_cast<int32_t*>(state.const_data_ptr<int32_t>())));
  }
  Tensor tokens = at::empty({probs.size(0)}, at::kLong);
  int64_t* out = tokens.mutable_data_ptr<int64_t>();
  const float* p = probs.const_data_ptr<float>();
  at::parallel_for(0, probs.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = draw(words[i], p + i * probs.size(1), probs.size(1));
  });
  return tokens;
}

}  // namespace

TORCH_LIBRARY(hf_cb, library) {
  library.def("draw(Tensor[] states, Tensor probs) -> Tensor");
  library.def(
      "plan(Tensor starts, Tensor key_lens, int heads, int group, int value_size, int? window, int? chunk) "
      "-> (Tensor, Tensor, Tensor)");
  library.def(
      "attend(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor table, "
      "Tensor pieces, Tensor merges, Tensor partials, Tensor? sinks, float scale, int? window, int? chunk, "
      "float? softcap, bool matrix=False) -> Tensor");
}

TORCH_LIBRARY_IMPL(hf_cb, CPU, library) {
  library.impl("plan", plan);
  library.impl("attend", attend_op);
  library.impl("draw", draw_all);
}

}  // namespace hf_cb
