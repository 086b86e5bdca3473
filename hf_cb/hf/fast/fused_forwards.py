"""Short forwards for modules of the twin: what norms, gated MLPs, attention modules, decoder layers and stacks of them do,
in one or a few calls of the compiled kernels each. `fusing.py` says which modules get one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_cb.attention.native import arguments, spec_arguments
from hf_cb.attention.step import LayerSpec
from hf_cb.hf.fast.packing import Pack
from hf_cb.hf.twins.attention import port_of
from hf_cb.runtime.port import AttentionPort


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
    spec: LayerSpec
    joined: Pack
    out: Pack

    @property
    def heads(self) -> tuple[int, int, int]:
        """Numbers of heads of queries, keys and values."""
        return self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads

    @property
    def size(self) -> int:
        """Numbers of one head."""
        return self.spec.head_size

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
        """The weight and the settings as the kernels take them."""
        return self.weight, self.eps, self.offset, self.late


@dataclass(slots=True, eq=False)
class FusedLayer:
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

    @property
    def packs(self) -> tuple[Pack, Pack, Pack, Pack]:
        """The packs of the layer's products, in their order."""
        return self.attention.joined, self.attention.out, self.mlp.inner, self.mlp.down

    @property
    def form(self) -> tuple[object, ...]:
        """All but its numbers: layers that are alike in this can be computed by one call."""
        widths = tuple((pack.own().width, pack.own().matrix) for pack in self.packs)
        mlp = self.mlp
        return *self.first.numbers[1:], *self.second.numbers[1:], widths, self.attention.spec, mlp.activation, mlp.swapped


class Stack:
    """Layers of one form that follow each other, as the first one's forward; the others pass on what they are given."""

    def __init__(self, layers: dict[nn.Module, FusedLayer], selects: bool) -> None:
        """`layers`: by their modules. `selects`: of what the last one gives only the tokens matter whose logits are wanted."""
        self.layers = [*layers.values()]
        self.packs = [pack for layer in self.layers for pack in layer.packs]
        self._layer_of = layers
        self._selects = selects
        self._modules = [layer.attention.module for layer in self.layers]
        self._norms = [norm.weight for layer in self.layers for norm in (layer.first, layer.second)]

    def put(self) -> None:
        """In the place of the layers."""
        for i, module in enumerate(self._layer_of):
            vars(module)["forward"] = _passed if i else self

    def take_apart(self) -> None:
        """Each layer by itself again, as far as that has not been done."""
        for module, layer in self._layer_of.items():
            if vars(module).get("forward") in (self, _passed):
                vars(module)["forward"] = layer

    def __call__(
        self, x: torch.Tensor, *_: Any, position_embeddings: tuple[torch.Tensor, torch.Tensor], **__: Any
    ) -> torch.Tensor:
        """[1, T, width] -> [1, T, width]: as all of them one after another, but for tokens that nobody wants."""
        port = port_of(self._modules[0])
        assert isinstance(port, AttentionPort)
        together = port.together(self._modules)
        if together is None:
            for layer in self.layers:
                x = layer(x, position_embeddings=position_embeddings)
            return x
        layer = self.layers[0]
        attention, mlp, packed = layer.attention, layer.mlp, [pack.own() for pack in self.packs]
        return torch.ops.hf_cb.layers(  # type: ignore[no-any-return]
            *(x, *position_embeddings, self._norms, *layer.first.numbers[1:]),
            *([own.weight for own in packed], [own.bias for own in packed]),
            *(packed[0].width, packed[2].width // 2, packed[0].matrix, mlp.activation, mlp.swapped, attention.spec.num_heads),
            *(together.caches, *arguments(together.step, together.plan), *spec_arguments(attention.spec)),
            together.wanted if self._selects else None,
        )


def _passed(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """The forward of a layer that has been computed with the first of its stack."""
    return x
