"""SwapSpace: host memory for the blocks of preempted sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_cb.attention.step import LayerKV, LayerSpec
from hf_cb.runtime.kv_cache import KVCache, lazy_zeros


class SwapSpace:
    """`num_blocks` host blocks like those of `cache`; pinned where the cache is on another device than the CPU."""

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._cache = cache
        self._layers = tuple(
            LayerKV(_host_blocks(spec, spec.head_size, self), _host_blocks(spec, spec.value_head_size, self))
            for spec in cache.specs
        )

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._cache.block_size

    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (block of the cache, block of this space) each."""
        for device, host in self._tensors():
            source, target = _indices(pairs)
            host[target] = device[source.to(device.device)].to(host.device)

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (block of this space, block of the cache) each."""
        for device, host in self._tensors():
            source, target = _indices(pairs)
            device[target.to(device.device)] = host[source].to(device.device)

    def _tensors(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = zip(self._cache.tensors, self._layers, strict=True)
        return [both for device, host in pairs for both in zip(device, host, strict=True)]


def _host_blocks(spec: LayerSpec, head_size: int, space: SwapSpace) -> torch.Tensor:
    shape = (space.num_blocks, space.block_size, spec.num_kv_heads, head_size)
    if spec.device.type == "cpu":
        return lazy_zeros(shape, spec.stored_dtype)
    return torch.empty(shape, dtype=spec.stored_dtype, pin_memory=True)


def _indices(pairs: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    sources, targets = zip(*pairs, strict=True)
    return torch.tensor(sources), torch.tensor(targets)
