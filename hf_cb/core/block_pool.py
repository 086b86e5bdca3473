"""BlockPool: who owns each block of the KV cache, and which one is evicted from the prefix cache next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from hf_cb.errors import EngineDeadError, InvalidArgumentError


@dataclass(slots=True)
class Block:
    """`ref_count`: how many block tables hold it. `key`: what its `content` is published under, if it is."""

    ref_count: int = 0
    key: Hashable | None = None
    content: object = None


class BlockPool:
    """`num_blocks` blocks, named by their ids 0 .. num_blocks - 1. Every operation is O(1) per block.

    A block is in one of three states:

    * free: nobody holds it and its content is worth nothing. Reused first, the latest freed first: its memory is warm,
      and memory that was never touched stays so.
    * cached: nobody holds it, but its content is published and `lookup` finds it. Reused when no block is free, the
      least recently held first; that evicts the content.
    * owned: at least one block table holds it.

    Not thread-safe: one thread owns it. Misuse (releasing what nobody holds) is a broken invariant: EngineDeadError.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise InvalidArgumentError(f"num_blocks: takes an integer >= 1; got {num_blocks}")
        self._blocks = [Block() for _ in range(num_blocks)]
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # the next to be evicted comes first
        self._published: dict[Hashable, int] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return len(self._blocks)

    @property
    def num_reusable(self) -> int:
        """Blocks that `allocate` can hand out now: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_owned(self) -> int:
        """Blocks that some block table holds."""
        return len(self._blocks) - self.num_reusable

    def ref_count(self, block: int) -> int:
        """How many block tables hold `block`."""
        return self._blocks[block].ref_count

    def shared(self, blocks: Sequence[int]) -> list[int]:
        """Those of `blocks` that several block tables hold."""
        return [block for block in blocks if self._blocks[block].ref_count > 1]

    def allocate(self, n: int) -> tuple[int, ...] | None:
        """Ids of `n` blocks, each now held once; None, and nothing changed, if there are not so many now.

        Raises InvalidArgumentError if there could never be.
        """
        if not 0 <= n <= len(self._blocks):
            raise InvalidArgumentError(f"n: takes 0 to {len(self._blocks)} blocks, the size of the pool; got {n}")
        if n > self.num_reusable:
            return None
        ids = tuple(self._take_free() if self._free else self._evict() for _ in range(n))
        for block in ids:
            self._blocks[block].ref_count = 1
        return ids

    def incref(self, blocks: Sequence[int]) -> None:
        """One more block table holds `blocks`, which are owned or cached (as `lookup` found them)."""
        for block in blocks:
            entry = self._blocks[block]
            if entry.ref_count == 0:
                if entry.key is None:
                    raise EngineDeadError(f"block {block} is free: it has no content to share")
                del self._cached[block]
            entry.ref_count += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One block table less holds `blocks`, given in the order of the sequence that they held.

        The tail goes first, so that of a sequence's cached blocks the last is evicted first: a prefix is found from its
        start, so a head without its tail is of use and a tail without its head is not.
        """
        for block in reversed(blocks):
            entry = self._blocks[block]
            if entry.ref_count == 0:
                raise EngineDeadError(f"block {block} was released and nobody holds it")
            entry.ref_count -= 1
            if entry.ref_count == 0:
                if entry.key is None:
                    self._put_free(block)
                else:
                    self._cached[block] = None

    def publish(self, block: int, key: Hashable, content: object = None) -> bool:
        """Let `lookup(key, content)` find `block`, which is owned and whose content is final, until it is reused.

        `content` says what it is, if `key` is but a hash of that. False, and nothing changed, if another block is published
        under the key already.
        """
        entry = self._blocks[block]
        if entry.ref_count == 0 or key is None or entry.key not in (None, key):
            raise EngineDeadError(f"block {block} cannot be published: it is not owned, or has other content")
        if self._published.setdefault(key, block) != block:
            return False
        entry.key, entry.content = key, content
        return True

    def unpublish(self, key: Hashable) -> None:
        """Let `lookup` find nothing under `key` any more. Who holds the block keeps it."""
        block = self._published.pop(key, None)
        if block is None:
            return
        entry = self._blocks[block]
        entry.key = entry.content = None
        if entry.ref_count == 0:
            del self._cached[block]
            self._put_free(block)

    def lookup(self, key: Hashable, content: object = None) -> int | None:
        """The block that was published as `key` with that `content`, owned or cached. `incref` it to hold it."""
        block = self._published.get(key)
        return block if block is not None and self._blocks[block].content == content else None

    def unpublish_all(self) -> None:
        """Let `lookup` find nothing any more: what the blocks hold is out of date. Who holds a block keeps it."""
        for block in self._published.values():
            entry = self._blocks[block]
            entry.key = entry.content = None
        self._published.clear()
        for block in self._cached:
            self._put_free(block)
        self._cached.clear()

    def check(self) -> None:
        """Raise EngineDeadError unless every block is free, cached or owned and the map agrees. O(num_blocks)."""
        owned = [i for i, entry in enumerate(self._blocks) if entry.ref_count > 0]
        if sorted([*self._free, *self._cached, *owned]) != list(range(len(self._blocks))):
            raise EngineDeadError(
                f"block pool: {len(self._free)} free + {len(self._cached)} cached + {len(owned)} owned "
                f"are not the {len(self._blocks)} blocks, each once"
            )
        keys = {entry.key: i for i, entry in enumerate(self._blocks) if entry.key is not None}
        if keys != self._published or sum(entry.key is not None for entry in self._blocks) != len(keys):
            raise EngineDeadError("block pool: the published keys are not those of the blocks")
        if any(self._blocks[i].key is not None for i in self._free) or any(self._blocks[i].key is None for i in self._cached):
            raise EngineDeadError("block pool: a free block has published content, or a cached one has none")

    def _take_free(self) -> int:
        return self._free.pop()

    def _put_free(self, block: int) -> None:
        self._free.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        entry = self._blocks[block]
        del self._published[entry.key]
        entry.key = entry.content = None
        return block
