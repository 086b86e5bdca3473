"""KVManager: the block tables of the sequences that hold blocks."""

from __future__ import annotations

from collections import Counter

from hf_cb.core.block_pool import BlockPool
from hf_cb.core.sequence import Sequence
from hf_cb.errors import EngineDeadError, InvalidArgumentError, RequestTooLongError


class KVManager:
    """Grows and releases block tables over `pool`, whose blocks hold `block_size` tokens each."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        if block_size < 1:
            raise InvalidArgumentError(f"block_size: takes an integer >= 1; got {block_size}")
        self._pool = pool
        self._block_size = block_size
        self._holders: dict[int, Sequence] = {}

    @property
    def num_slots(self) -> int:
        """Tokens that the whole pool can hold."""
        return self._pool.num_blocks * self._block_size

    @property
    def blocks_used(self) -> int:
        """Blocks that sequences hold now."""
        return self._pool.num_owned

    @property
    def tokens_stored(self) -> int:
        """Tokens whose keys and values are in those blocks."""
        return sum(seq.num_computed_tokens for seq in self._holders.values())

    def can_reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether `reserve` would succeed now."""
        return self._num_missing(seq, num_tokens) <= self._pool.num_reusable

    def reserve(self, seq: Sequence, num_tokens: int) -> tuple[int, ...] | None:
        """Grow `seq`'s block table until it covers `num_tokens` tokens and return it. None, nothing changed: not now.

        Raises RequestTooLongError if the whole pool would not do.
        """
        missing = self._num_missing(seq, num_tokens)
        if missing > 0:
            if num_tokens > self.num_slots:
                raise RequestTooLongError(f"num_tokens: {num_tokens} do not fit the KV cache, which holds {self.num_slots}")
            blocks = self._pool.allocate(missing)
            if blocks is None:
                return None
            seq.block_table += blocks
            self._holders[seq.request_id] = seq
        return seq.block_table

    def release(self, seq: Sequence) -> None:
        """Give `seq`'s blocks back; nothing of it counts as computed any more."""
        self._pool.release(seq.block_table)
        self._holders.pop(seq.request_id, None)
        seq.block_table = ()
        seq.num_computed_tokens = 0

    def check(self) -> None:
        """Raise EngineDeadError unless the pool is sound and the tables are what it counts."""
        self._pool.check()
        held = Counter(block for seq in self._holders.values() for block in seq.block_table)
        if len(held) != self._pool.num_owned or any(self._pool.ref_count(block) != n for block, n in held.items()):
            raise EngineDeadError("KV cache: the block tables are not what the pool counts")
        for seq in self._holders.values():
            if seq.num_computed_tokens > len(seq.block_table) * self._block_size:
                raise EngineDeadError(f"KV cache: request {seq.request_id} has more computed tokens than slots")

    def _num_missing(self, seq: Sequence, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size) - len(seq.block_table)
