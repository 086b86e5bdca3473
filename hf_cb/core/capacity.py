"""Capacity: what one request may ask for at the most."""

from __future__ import annotations

from dataclasses import dataclass

from hf_cb.core.block_tables import BlockTables
from hf_cb.errors import RequestTooLongError
from hf_cb.request import Request


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of a whole KV cache and all seats. Nothing in it changes: any thread may ask."""

    tables: BlockTables
    num_seats: int

    @property
    def max_tokens(self) -> int:
        """Of prompt and output of one request: the last token is never fed back, so it needs no slot."""
        return self.tables.num_slots + 1

    def check(self, request: Request) -> None:
        """Raise RequestTooLongError if `request` could not run to its end even alone."""
        if request.width > self.num_seats:
            raise RequestTooLongError(f"num_beams: {request.width} beams run together, and max_batch_size is {self.num_seats}")
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
