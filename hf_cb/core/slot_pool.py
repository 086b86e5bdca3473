"""SlotPool: a BlockPool that hands out the lowest free block first.

Slots of states that follow one another are read and written as one tensor, without a copy. Handed out in this order, those that
the rows of a step write follow one another again soon after others came and went.
"""

from __future__ import annotations

import heapq

from typing_extensions import override

from hf_cb.core.block_pool import BlockPool


class SlotPool(BlockPool):
    """See above; else as BlockPool, at O(log num_blocks) for each block."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._free.reverse()  # a heap

    @override
    def _take_free(self) -> int:
        return heapq.heappop(self._free)

    @override
    def _put_free(self, block: int) -> None:
        heapq.heappush(self._free, block)
