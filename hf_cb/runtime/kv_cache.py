"""KVCache: the cache tensors, one pair per attention layer, each with its own heads, head sizes, dtype and device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from hf_cb.attention.step import LayerKV, LayerSpec


class KVCache:
    """Key and value blocks of every layer, indexed alike: block b of the pool is block b in each layer's tensors."""

    def __init__(self, specs: Sequence[LayerSpec], num_blocks: int, block_size: int) -> None:
        """Allocate zeroed memory; on a CPU, pages take room only from when they are first written."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._specs = tuple(specs)
        self.layers: tuple[LayerKV, ...] = ()  # none while the memory is given back
        self.restore()

    @property
    def is_released(self) -> bool:
        """Whether the memory is given back."""
        return not self.layers

    def release(self) -> None:
        """Give the memory back to the system; what was in it is lost."""
        self.layers = ()
        if any(spec.device.type == "cuda" for spec in self._specs):
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Take the memory (again), zeroed. Raises what torch or numpy raise when there is none."""
        self.layers = tuple(
            LayerKV(self._zeros(spec, spec.head_size), self._zeros(spec, spec.value_head_size)) for spec in self._specs
        )

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each, in every layer; no target stands twice. All sources are read first."""
        sources, targets = torch.tensor(pairs).T
        for layer in self.layers:
            for blocks in layer:
                blocks[targets.to(blocks.device)] = blocks[sources.to(blocks.device)]

    def _zeros(self, spec: LayerSpec, head_size: int) -> torch.Tensor:
        shape = (self.num_blocks, self.block_size, spec.num_kv_heads, head_size)
        if spec.device.type != "cpu":
            return torch.zeros(shape, dtype=spec.dtype, device=spec.device)
        return lazy_zeros(shape, spec.dtype)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU whose pages take memory from when they are first written."""
    # numpy leaves the zeroing to the system, page by page at first use; torch.zeros would write, and take, all of it now.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
