"""Capacity: how many blocks a request may need, and how many are left for others."""

from __future__ import annotations

from dataclasses import dataclass

from hf_cb.core.block_tables import BlockTables
from hf_cb.core.sequence import Sequence
from hf_cb.errors import RequestTooLongError
from hf_cb.request import Request

_WATERMARK = 100  # one block in so many stays free at admission, for those that run


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of a whole KV cache. Nothing in it changes: any thread may ask."""

    tables: BlockTables

    @property
    def max_tokens(self) -> int:
        """Of prompt and output of one request: the last token is never fed back, so it needs no slot."""
        return self.tables.num_slots + 1

    def check(self, request: Request) -> None:
        """Raise RequestTooLongError if `request` could not run to its end even alone."""
        needed = self.tables.num_needed(len(request.prompt), request.max_tokens - 1, request.width)
        if request.width > 1 and needed > self.tables.num_blocks:
            raise RequestTooLongError(
                f"num_beams: {request.width} beams of {request.max_tokens} tokens can take {needed} blocks, and the KV cache "
                f"has {self.tables.num_blocks}; raise num_blocks or kv_cache_memory"
            )
        if request.max_tokens > self.max_tokens:
            raise RequestTooLongError(
                f"max_new_tokens: {len(request.prompt)} prompt tokens and {request.max_new_tokens} new ones are "
                f"{request.max_tokens}, and at most {self.max_tokens} fit the KV cache; "
                f"shorten the prompt, lower max_new_tokens, or raise num_blocks or kv_cache_memory"
            )

    def num_for_beams(self, trunk: Sequence) -> int:
        """Blocks that the beams of a trunk take beyond its own, to compute the tokens that they have or are about to get."""
        if trunk.request.search is None:
            return 0
        slots = min(trunk.num_tokens + max(map(len, trunk.tails), default=1), trunk.request.max_tokens - 1)
        needed = self.tables.num_needed(trunk.num_tokens, slots, trunk.request.width)
        return needed - self.tables.num_blocks_for(self.tables.stretches(trunk.num_tokens))

    def headroom(self, num_running: int, is_crowded: bool) -> int:
        """Blocks to leave free for those that run, so that who is admitted is not preempted, or preempts, right away."""
        if not num_running:
            return 0
        watermark = self.tables.num_blocks // _WATERMARK
        return max(watermark, num_running * self.tables.num_groups) if is_crowded else watermark
