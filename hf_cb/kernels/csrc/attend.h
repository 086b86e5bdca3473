// Attention of one layer for those who call it from C++; see attention.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace hf_cb {

// `known`: the same step has been checked already, with caches of this size.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, at::Tensor k_cache, at::Tensor v_cache,
                  const at::Tensor& slots, const at::Tensor& table, const at::Tensor& pieces, const at::Tensor& merges,
                  const at::Tensor& partials, const std::optional<at::Tensor>& sinks, double scale,
                  std::optional<int64_t> window, std::optional<int64_t> chunk, std::optional<double> softcap, bool matrix, bool known);

}  // namespace hf_cb
