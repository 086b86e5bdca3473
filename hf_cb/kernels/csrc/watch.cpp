// torch.ops.hf_cb.marks and .checksums: what tells that a tensor was written to, for all of a model's at once; see
// hf/twins/weights.py.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace hf_cb {
namespace {

// [n, 2] int64: each tensor's version (0 where it keeps none) and address.
at::Tensor marks(at::TensorList tensors) {
  at::Tensor found = at::empty({int64_t(tensors.size()), 2}, at::kLong);
  int64_t* to = found.mutable_data_ptr<int64_t>();
  for (const at::Tensor& tensor : tensors) {
    *to++ = tensor.is_inference() ? 0 : tensor._version();
    *to++ = reinterpret_cast<int64_t>(tensor.const_data_ptr());
  }
  return found;
}

constexpr int64_t kPiece = 1 << 20;  // bytes that one thread reads on end
constexpr int kLanes = 64;           // sums side by side, so that none waits for the one before

struct Piece {
  const char* from;
  int64_t size;
  size_t tensor;
};

uint32_t mixed(uint32_t sum, uint32_t word) {
  sum = (sum ^ word) * 0x9E3779B1u;
  return sum ^ (sum >> 15);  // or the highest bits, signs, would only ever meet each other: two changes would undo each other
}

uint64_t checksum(const char* from, int64_t size) {
  uint32_t sums[kLanes], words[kLanes];
  for (int i = 0; i < kLanes; ++i) sums[i] = i;
  for (; size > 0; from += sizeof(words), size -= sizeof(words)) {
    if (size < int64_t(sizeof(words))) std::memset(words, 0, sizeof(words));
    std::memcpy(words, from, std::min<int64_t>(size, sizeof(words)));
    for (int i = 0; i < kLanes; ++i) sums[i] = mixed(sums[i], words[i]);
  }
  uint64_t all = 0;
  for (uint32_t sum : sums) all = all * 0x9E3779B97F4A7C15u + sum;
  return all;
}

// [n] int64: one number for all bytes of each.
at::Tensor checksums(at::TensorList tensors) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK(tensors[i].device().is_cpu() && tensors[i].is_contiguous(), "tensors: contiguous ones on a CPU");
    const char* from = static_cast<const char*>(tensors[i].const_data_ptr());
    const int64_t size = tensors[i].nbytes();
    for (int64_t at = 0; at < size; at += kPiece) pieces.push_back({from + at, std::min(kPiece, size - at), i});
  }
  std::vector<uint64_t> sums(pieces.size());
  at::parallel_for(0, pieces.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sums[i] = checksum(pieces[i].from, pieces[i].size);
  });
  at::Tensor found = at::empty({int64_t(tensors.size())}, at::kLong);
  int64_t* to = found.mutable_data_ptr<int64_t>();
  std::fill_n(to, tensors.size(), 0);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const size_t tensor = pieces[i].tensor;
    to[tensor] = int64_t(uint64_t(to[tensor]) * 0x9E3779B97F4A7C15u + sums[i]);
  }
  return found;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(hf_cb, library) {
  library.def("marks(Tensor[] tensors) -> Tensor", marks);
  library.def("checksums(Tensor[] tensors) -> Tensor", checksums);
}

}  // namespace hf_cb
