"""SwapSpace: host memory for the blocks of preempted sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hf_cb.attention.step import LayerKV, LayerSpec
from hf_cb.runtime.kv_cache import KVCache, lazy_zeros
from hf_cb.runtime.streams import Streams


class SwapSpace:
    """`num_blocks` host blocks like those of `cache`; pinned where the cache is on another device than the CPU.

    Nothing waits for a copy: it stands between what its device computes before and after it. See Streams.swapping.
    """

    def __init__(self, cache: KVCache, num_blocks: int, streams: Streams) -> None:
        self._cache = cache
        self._streams = streams
        room = num_blocks, cache.block_size
        self._layers = tuple(
            LayerKV(_host_blocks(spec, spec.head_size, *room), _host_blocks(spec, spec.value_head_size, *room))
            for spec in cache.specs
        )

    @property
    def waits(self) -> bool:
        """Whether a copy is done when the call returns, so that its time can be taken."""
        return self._streams.waits

    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (block of the cache, block of this space) each."""
        for device, host in self._swapping():
            for block, host_block, length in _runs(pairs):
                host[host_block : host_block + length].copy_(device[block : block + length], non_blocking=True)

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (block of this space, block of the cache) each."""
        for device, host in self._swapping():
            for host_block, block, length in _runs(pairs):
                device[block : block + length].copy_(host[host_block : host_block + length], non_blocking=True)

    def _swapping(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(blocks of the cache, blocks of this space) of each tensor, while its device's streams are those for swapping."""
        pairs = [both for layer in zip(self._cache.tensors, self._layers, strict=True) for both in zip(*layer, strict=True)]
        for where in dict.fromkeys(device.device for device, _ in pairs):
            with self._streams.swapping(where):
                yield from (pair for pair in pairs if pair[0].device == where)


def _host_blocks(spec: LayerSpec, head_size: int, num_blocks: int, block_size: int) -> torch.Tensor:
    shape = (num_blocks, block_size, spec.num_kv_heads, head_size)
    if spec.device.type == "cpu":
        return lazy_zeros(shape, spec.stored_dtype)
    return torch.empty(shape, dtype=spec.stored_dtype, pin_memory=True, device="cpu")


def _runs(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(source, target, length) of pairs that follow one another: each is one copy."""
    runs: list[tuple[int, int, int]] = []
    for source, target in pairs:
        if runs and (source, target) == (sum(runs[-1][::2]), sum(runs[-1][1:])):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((source, target, 1))
    return runs
