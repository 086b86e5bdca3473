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

from dataclasses import dataclass
from typing import NamedTuple

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


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's attention, as its module asked for it. Nothing assumes that two layers are alike.

    `window` W: a query sees its own key and the W - 1 before it. `chunk` C: a query at position p sees only keys at
    positions >= (p // C) * C. `softcap` c: scores become c * tanh(scores / c) before the mask.
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

    @property
    def bytes_per_token(self) -> int:
        """Bytes of cache that one token takes in this layer."""
        return self.num_kv_heads * (self.head_size + self.value_head_size) * self.dtype.itemsize


class LayerKV(NamedTuple):
    """One layer's cache tensors, laid out as above."""

    k: torch.Tensor
    v: torch.Tensor

    def write(self, step: AttentionStep, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put a step's keys and values, [T, Hkv, D] and [T, Hkv, Dv], into their slots."""
        self.k.flatten(0, 1).index_copy_(0, step.slot_mapping, k)
        self.v.flatten(0, 1).index_copy_(0, step.slot_mapping, v)
