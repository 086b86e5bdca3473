"""What attention needs to know about one step, and about one layer.

Layouts (T: packed tokens of the step, N: rows, i.e. sequences):

* queries ``q [T, Hq, D]``, new keys ``k [T, Hkv, D]``, new values ``v [T, Hkv, Dv]``: rows one after another, no padding
* cache ``k [num_blocks, block_size, Hkv, D]``, ``v [num_blocks, block_size, Hkv, Dv]``
* the token at position p of row i lives in block ``block_table[i, p // block_size]`` at offset ``p % block_size``;
  its *slot* is ``block * block_size + offset``
* causal masks are aligned bottom-right: row i's query number j (of ``query_lens[i]``) stands at position
  ``key_lens[i] - query_lens[i] + j`` and sees the keys at positions up to its own
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """One step's rows, for every layer alike. Index tensors are int32 (flash-attn's rule), slots int64 (torch's).

    Entries of `block_table` past a row's used blocks are valid ids (kernels may prefetch them), usually 0.
    `query_lens` and `key_lens` are the same facts on the host, so that nobody has to synchronise to read them.
    """

    cu_seqlens_q: torch.Tensor  # [N + 1] int32: row i's queries are q[cu[i]:cu[i + 1]]
    seq_lens_k: torch.Tensor  # [N] int32: keys of row i, those of this step included
    block_table: torch.Tensor  # [N, max_blocks] int32
    slot_mapping: torch.Tensor  # [T] int64: where the new keys and values go
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    max_seqlen_q: int
    max_seqlen_k: int
    block_size: int

    def slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where the keys and values of these positions of these rows are: int64, of the shape that both have together."""
        return self.block_table[rows, positions // self.block_size].long() * self.block_size + positions % self.block_size

    def to(self, device: torch.device) -> AttentionStep:
        """The same step for layers on `device`."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)}
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's attention, as its module asked for it. Nothing assumes that two layers are alike.

    `window` W: a query sees its own key and the W - 1 before it. `chunk` C: a query at position p sees only keys at
    positions >= (p // C) * C. `softcap` c: scores become c * tanh(scores / c) before the mask. `kv_dtype`: that of the cache,
    where it is to be another than `dtype`, that of q, k and v.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    value_head_size: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    kv_dtype: torch.dtype | None = None

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype in which the cache keeps keys and values."""
        return self.kv_dtype or self.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of cache that one token takes in this layer."""
        return self.num_kv_heads * (self.head_size + self.value_head_size) * self.stored_dtype.itemsize


class LayerKV(NamedTuple):
    """One layer's cache tensors, laid out as above."""

    k: torch.Tensor
    v: torch.Tensor

    def write(self, step: AttentionStep, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put a step's keys and values, [T, Hkv, D] and [T, Hkv, Dv], into their slots, in the cache's dtype."""
        for blocks, new in ((self.k, k), (self.v, v)):
            target, source = blocks.flatten(0, 1), saturated(new, blocks.dtype)
            if blocks.dtype.itemsize == 1:  # torch knows no index_copy_ in float8
                target, source = target.view(torch.uint8), source.view(torch.uint8)
            target.index_copy_(0, step.slot_mapping, source)

    def gather(self, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values in `slots`, [*slots.shape, Hkv, D] and [.., Dv], in `dtype`."""
        keys, values = (blocks.flatten(0, 1)[slots].to(dtype) for blocks in self)
        return keys, values


def saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` in `dtype`, where what is beyond its largest number becomes that number: in float8 it would be NaN."""
    if x.dtype == dtype:
        return x
    most = torch.finfo(dtype).max
    return (x.clamp(-most, most) if most < torch.finfo(x.dtype).max else x).to(dtype)


class LayerCall(NamedTuple):
    """What one layer hands to its backend in a step.

    q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv]: any strides. `plan`: what the backend has made for the step's layers of this
    spec. `sinks` [Hq]: a learned logit per head that takes part in the softmax and has no value.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv: LayerKV
    spec: LayerSpec
    step: AttentionStep
    plan: Any
    sinks: torch.Tensor | None = None

    def write(self) -> None:
        """Put the new keys and values into their slots."""
        self.kv.write(self.step, self.k, self.v)
