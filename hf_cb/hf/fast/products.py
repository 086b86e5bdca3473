"""Products of rows with packed weights on a CPU: by the compiled kernels, or by oneDNN, the library behind torch's own.

The kernels (kernels/csrc/linear.h) read a weight as one stream, and their sums have one order: a row's bits are the same in
any company. With AMX, which only the library's kernels know, sixteen rows and more go through those, over the same copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from typing_extensions import override

from hf_cb.kernels.extension import BuildError, has_matrix_unit, load

_TOKENS_HINT = 16  # tokens a step for which oneDNN chooses the order; it matters little


class Packed(Protocol):
    """A weight [out, in] with its bias, laid out for products."""

    width: int  # out

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        ...


class Products(Protocol):
    """A way to compute products with packed weights."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        """A copy of weight [out, in], contiguous, and bias [out]."""
        ...


def products_for(dtype: torch.dtype) -> Products | None:
    """The best for weights of this dtype on this machine; None: torch's plain ones are."""
    if dtype in (torch.float32, torch.bfloat16, torch.float16) and kernels_panel():
        return OwnProducts()
    return LibraryProducts() if _library_takes(dtype) else None


def kernels_panel() -> int:
    """Columns that the kernels compute at once; 0 where there are none, or no vector instructions for them."""
    try:
        load()
    except BuildError:  # the attention backend has said so
        return 0
    return int(torch.ops.hf_cb.panel())


class OwnProducts(Products):
    """Products by the compiled kernels."""

    @override
    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> OwnPacked:
        packed = torch.ops.hf_cb.pack(weight)
        if bias is not None:
            bias = torch.nn.functional.pad(bias.float(), (0, packed.shape[0] * packed.shape[2] - len(bias)))
        return OwnPacked(packed, bias, len(weight), has_matrix_unit())


@dataclass(slots=True)
class OwnPacked(Packed):
    """A weight in the panels of csrc/linear.h."""

    weight: torch.Tensor  # [panels, steps, columns, depth of a step]
    bias: torch.Tensor | None  # [panels * columns] float32
    width: int
    matrix: bool  # whether to go through AMX

    @override
    def product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.hf_cb.linear(x, self.weight, self.bias, self.width, self.matrix)  # type: ignore[no-any-return]

    def gated(self, x: torch.Tensor, activation: int, swapped: bool) -> torch.Tensor:
        """[..., in] -> [..., out / 2]: activation(first half of the columns) * the second, or swapped."""
        return torch.ops.hf_cb.gated(  # type: ignore[no-any-return]
            x, self.weight, self.bias, self.width // 2, self.matrix, activation, swapped
        )


class LibraryProducts(Products):
    """Products by oneDNN."""

    @override
    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> _LibraryPacked:
        return _LibraryPacked(torch.ops.mkldnn._reorder_linear_weight(weight, _TOKENS_HINT), bias, len(weight))


@dataclass(slots=True)
class _LibraryPacked(Packed):
    weight: torch.Tensor  # in an order of the library's own
    bias: torch.Tensor | None
    width: int

    @override
    def product(self, x: torch.Tensor) -> torch.Tensor:
        if not x.numel():  # no row of the step needs logits, and the library takes no empty input
            return x.new_empty((*x.shape[:-1], self.width))
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]


def _library_takes(dtype: torch.dtype) -> bool:
    ops = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(ops._is_mkldnn_fp16_supported())
    return dtype == torch.float32
