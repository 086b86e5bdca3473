"""KVCache: the cache tensors, one pair per attention layer, each with its own heads, head sizes, dtype and device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_cb.attention.step import LayerKV, LayerSpec


class KVCache:
    """Key and value blocks of every layer, indexed alike: block b of the pool is block b in each layer's tensors."""

    def __init__(self, specs: Sequence[LayerSpec], num_blocks: int, block_size: int) -> None:
        """Allocate. Zeroed memory: on a CPU the pages are only taken when they are first written."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: tuple[LayerKV, ...] = tuple(
            LayerKV(self._zeros(spec, spec.head_size), self._zeros(spec, spec.value_head_size)) for spec in specs
        )

    def _zeros(self, spec: LayerSpec, head_size: int) -> torch.Tensor:
        shape = (self.num_blocks, self.block_size, spec.num_kv_heads, head_size)
        return torch.zeros(shape, dtype=spec.dtype, device=spec.device)
