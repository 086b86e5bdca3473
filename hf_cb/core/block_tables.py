"""BlockTables: the form of the block tables of one KV cache.

Layers that look back only so far need a sequence's latest blocks alone. So layers are in groups of equal reach, each group has
blocks of its own in the same pool, and gives back those that no later token can see. A block table holds, for each stretch of
`block_size` tokens, a block of each group in turn: the block of group g for position p stands at p // block_size * groups + g.
The id `gone`, one beyond the pool's, stands for what was given back: a block of zeros.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Sequence

from hf_cb.core.reach import Reach

Table = tuple[int, ...]


class BlockTables:
    """`reaches`: one for each group of layers. `max_step_tokens`: tokens that one sequence can get in a step."""

    def __init__(self, num_blocks: int, block_size: int, reaches: Sequence[Reach], max_step_tokens: int) -> None:
        self.num_blocks, self.block_size, self.reaches = num_blocks, block_size, tuple(reaches)
        self.num_groups = len(reaches)
        self.gone = num_blocks
        self.short = [(g, reach) for g, reach in enumerate(reaches) if reach.span is not None]
        # Of each group: the most blocks that a sequence holds. Two more than tokens fill: they begin and end within one.
        spans = [reach.span for reach in reaches]
        self._most = [None if span is None else -(-(span + max_step_tokens) // block_size) + 2 for span in spans]
        self.num_slots = self._slots()  # tokens that one sequence can have in the whole pool

    def stretches(self, num_tokens: int) -> int:
        """How many stretches of `block_size` tokens so many fill, the last maybe in part."""
        return -(-num_tokens // self.block_size)

    def num_blocks_for(self, stretches: int) -> int:
        """Blocks that a sequence of so many stretches holds at the most."""
        return sum(stretches if most is None else min(most, stretches) for most in self._most)

    def num_missing(self, stretches: int, table: Table) -> int:
        """Blocks that a sequence with `table` takes at the most to grow by so many stretches: what it holds counts, too."""
        held = [sum(block != self.gone for block in table[g :: self.num_groups]) for g in range(self.num_groups)]
        most = zip(self._most, held, strict=True)
        return sum(stretches if limit is None else min(stretches, max(0, limit - own)) for limit, own in most)

    def num_needed(self, prompt: int, slots: int, width: int) -> int:
        """Blocks for `width` sequences of `slots` tokens each that begin with the same `prompt` tokens, and share no others."""
        shared = prompt // self.block_size
        needed = shared + width * (self.stretches(slots) - shared)
        return sum(needed if most is None else min(needed, width * most) for most in self._most)

    def _slots(self) -> int:
        if None not in self._most and self.num_blocks_for(sys.maxsize) <= self.num_blocks:
            return sys.maxsize  # it never holds more
        stretches = range(self.num_blocks + 1)
        return (bisect.bisect_right(stretches, self.num_blocks, key=self.num_blocks_for) - 1) * self.block_size

    def upto(self, table: Table, num_tokens: int) -> Table:
        """The part of a table that covers so many tokens."""
        return table[: self.stretches(num_tokens) * self.num_groups]

    def held(self, table: Sequence[int]) -> Sequence[int]:
        """The blocks of a table that are there."""
        return [block for block in table if block != self.gone] if self.short else table

    def seen_from(self, position: int, table: Table) -> Table | None:
        """A table without what no token from `position` on can see. None: something that one can see is gone from it."""
        if not self.short:
            return table
        seen = list(table)
        for g, reach in self.short:
            first = reach.first(position) // self.block_size
            own = seen[g :: self.num_groups]
            own[:first] = [self.gone] * min(first, len(own))
            if self.gone in own[first:]:
                return None
            seen[g :: self.num_groups] = own
        return tuple(seen)
