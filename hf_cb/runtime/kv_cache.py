"""KVCache: the cache tensors, a pair for each attention layer, with its own heads, head sizes, dtype and device. Layers of
several groups (`KVLayout`) share them, since a block belongs to one group at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from hf_cb.attention.step import LayerKV, LayerSpec
from hf_cb.runtime.kv_layout import KVLayout
from hf_cb.runtime.streams import to_device


class KVCache:
    """Key and value blocks of every layer, indexed alike: block b of the pool is block b in the tensors of its group's layers.

    Two more: a block of zeros stands for those that a group has given back, and no row writes to it; `scratch_block` is for
    rows that only fill up a batch to a certain size.
    """

    def __init__(self, specs: Sequence[LayerSpec], num_blocks: int, block_size: int, layout: KVLayout | None = None) -> None:
        """Allocate zeroed memory; on a CPU, pages take room only from when they are first written."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layout = layout or KVLayout((tuple(range(len(specs))),), ((None, None),))
        self.specs = tuple(specs[layer] for layer in max(self.layout.groups, key=len))  # of `tensors`
        self.tensors: tuple[LayerKV, ...] = ()  # none while the memory is given back, as with the next
        self.layers: tuple[LayerKV, ...] = ()  # each layer's tensors
        self.restore()

    @property
    def scratch_block(self) -> int:
        """The block that nobody's tokens are in."""
        return self.num_blocks + 1

    @property
    def is_released(self) -> bool:
        """Whether the memory is given back."""
        return self._is_released

    def release(self) -> None:
        """Give the memory back to the system; what was in it is lost."""
        self.tensors = self.layers = ()
        self._is_released = True
        for kind in {spec.device.type for spec in self.specs} - {"cpu"}:
            getattr(torch, kind).empty_cache()

    def restore(self) -> None:
        """Take the memory (again), zeroed. Raises what torch or numpy raise when there is none."""
        self._is_released = False
        self.tensors = tuple(
            LayerKV(self._zeros(spec, spec.head_size), self._zeros(spec, spec.value_head_size)) for spec in self.specs
        )
        own = {layer: kv for group in self.layout.groups for layer, kv in zip(group, self.tensors, strict=False)}
        self.layers = tuple(own[layer] for layer in sorted(own))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each; no target stands twice. All sources are read first."""
        indices: dict[torch.device, torch.Tensor] = {}
        for blocks in (blocks for pair in self.tensors for blocks in pair):
            if blocks.device not in indices:
                indices[blocks.device] = to_device(np.array(pairs).T, torch.int64, blocks.device)
            sources, targets = indices[blocks.device]
            blocks[targets] = blocks[sources]

    def _zeros(self, spec: LayerSpec, head_size: int) -> torch.Tensor:
        shape = (self.num_blocks + 2, self.block_size, spec.num_kv_heads, head_size)
        if spec.device.type != "cpu":
            return torch.zeros(shape, dtype=spec.stored_dtype, device=spec.device)
        return lazy_zeros(shape, spec.stored_dtype)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU whose pages take memory from when they are first written."""
    # numpy leaves the zeroing to the system, page by page at first use; torch.zeros would write, and take, all of it now.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
