"""Short forwards for modules of the twin: what norms, gated MLPs, attention modules and whole decoder layers compute, in one or
a few calls of the compiled kernels each. `fusing.py` says which modules get one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_cb.hf.attention import port_of
from hf_cb.hf.packing import Pack


@dataclass(slots=True, eq=False)
class GatedMLP:
    """down(activation(gate(x)) * up(x)): gate and up are two layers over one input, or one layer's halves."""

    inner: Pack
    down: Pack
    activation: int
    swapped: bool  # up comes first

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        return self.down.product(self.inner.own().gated(x, self.activation, self.swapped))


@dataclass(slots=True, eq=False)
class Attention:
    """Queries, keys and values in one product, rotary positions over whole heads, attention, and the product of the output."""

    module: nn.Module
    joined: Pack
    out: Pack
    heads: tuple[int, int, int]  # of queries, keys, values
    size: int

    @property
    def turned(self) -> int:
        """The heads that get rotary positions."""
        return self.heads[0] + self.heads[1]

    def attend(self, joined: torch.Tensor) -> torch.Tensor:
        """[1, T, all heads * size] -> [1, T, query heads * size]."""
        q, k, v = self.parts(joined)
        return port_of(self.module).serve(self.module, q, k, v, None).view(1, -1, self.heads[0] * self.size)

    def parts(self, joined: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[1, T, all heads * size] -> queries, keys and values [T, heads, size]."""
        return joined.view(-1, sum(self.heads), self.size).split_with_sizes(self.heads, 1)

    def __call__(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [1, T, in] -> ([1, T, out], None)."""
        joined = self.joined.product(hidden_states)
        torch.ops.hf_cb.rotate(joined, *position_embeddings, self.turned)
        return self.out.product(self.attend(joined)), None


@dataclass(slots=True, eq=False)
class Norm:
    """x / sqrt(mean(x^2) + eps) * (weight + offset)."""

    module: nn.Module
    weight: torch.Tensor
    eps: float
    offset: float
    late: bool  # rounded only at the end, not before the weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same."""
        if x.dtype != self.weight.dtype:
            return type(self.module).forward(self.module, x)  # type: ignore[no-any-return]
        return torch.ops.hf_cb.rms_norm(x, *self.numbers)  # type: ignore[no-any-return]

    @property
    def numbers(self) -> tuple[torch.Tensor, float, float, bool]:
        """As the kernels take them."""
        return self.weight, self.eps, self.offset, self.late


@dataclass(slots=True, eq=False)
class Layer:
    """x + attention(norm(x)), then the same with another norm and a gated MLP: in two calls round the attention's."""

    first: Norm
    attention: Attention
    second: Norm
    mlp: GatedMLP

    def __call__(
        self, x: torch.Tensor, *_: Any, position_embeddings: tuple[torch.Tensor, torch.Tensor], **__: Any
    ) -> torch.Tensor:
        """[1, T, width] -> [1, T, width]."""
        attention, mlp = self.attention, self.mlp
        joined, out, inner, down = attention.joined.own(), attention.out.own(), mlp.inner.own(), mlp.down.own()
        ops = torch.ops.hf_cb
        before = ops.before_attention(
            x,
            *self.first.numbers,
            joined.weight,
            joined.bias,
            joined.width,
            joined.matrix,
            *position_embeddings,
            attention.turned,
        )
        return ops.after_attention(  # type: ignore[no-any-return]
            *(attention.attend(before), x, out.weight, out.bias, *self.second.numbers),
            *(inner.weight, inner.bias, inner.width // 2, mlp.activation, mlp.swapped, down.weight, down.bias, down.matrix),
        )
