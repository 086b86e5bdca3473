// torch.ops.hf_cb.marks: what tells that a tensor was written to, for all of a model's at once; see ../../hf/weights.py.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

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

}  // namespace

TORCH_LIBRARY_FRAGMENT(hf_cb, library) { library.def("marks(Tensor[] tensors) -> Tensor", marks); }

}  // namespace hf_cb
