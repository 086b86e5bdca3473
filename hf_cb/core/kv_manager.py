"""KVManager: the block tables of the sequences that hold blocks, and what they share.

Full blocks are published under a chained hash of all tokens up to their end, after the step that wrote them succeeded. A
sequence that is admitted takes the published blocks that it begins with as its own, all but the one with its last token, whose
logits it needs. (The prefix cache of vLLM, Kwon et al., SOSP 2023, section 4.4.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from hf_cb.core.block_pool import BlockPool
from hf_cb.core.prefix import BlockName, PrefixNames
from hf_cb.core.sequence import Sequence
from hf_cb.errors import EngineDeadError, InvalidArgumentError, RequestTooLongError


class Start(NamedTuple):
    """What a sequence begins with: blocks that others have computed, and the tokens that they hold for it."""

    blocks: tuple[int, ...]
    num_tokens: int


class KVManager:
    """Grows and releases block tables over `pool`, whose blocks hold `block_size` tokens each.

    `shares`: whether what one sequence has computed is used by others. `num_host_blocks`: blocks in the host's memory, to which
    a sequence that has to wait can be moved.
    """

    def __init__(self, pool: BlockPool, block_size: int, shares: bool = False, num_host_blocks: int = 0) -> None:
        if block_size < 1:
            raise InvalidArgumentError(f"block_size: takes an integer >= 1; got {block_size}")
        self._pool = pool
        self._block_size = block_size
        self._shares = shares
        self._host = BlockPool(num_host_blocks) if num_host_blocks else None
        self._moved: set[Sequence] = set()  # those that wait in host blocks
        self._holders: set[Sequence] = set()
        self._coming: dict[bytes, Sequence] = {}  # key of a block -> the running sequence that is to publish it

    @property
    def num_slots(self) -> int:
        """Tokens that the whole pool can hold."""
        return self.num_blocks * self._block_size

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self._pool.num_blocks

    @property
    def blocks_used(self) -> int:
        """Blocks that sequences hold now."""
        return self._pool.num_owned

    @property
    def tokens_stored(self) -> int:
        """Tokens whose keys and values are in those blocks."""
        size = self._block_size
        # By the last block: the only one that can be both shared and not full.
        unused = {
            seq.block_table[-1]: len(seq.block_table) * size - seq.num_computed_tokens
            for seq in self._holders
            if seq.block_table
        }
        return self._pool.num_owned * size - sum(unused.values())

    def can_reserve(self, seq: Sequence, num_tokens: int, start: Start | None = None, headroom: int = 0) -> bool:
        """Whether `reserve` would succeed now, after `adopt(seq, start)`, and leave `headroom` blocks."""
        blocks, num_held = ((), 0) if start is None else start
        kept = sum(self._pool.ref_count(block) == 0 for block in blocks)
        copied = num_held % self._block_size > 0
        return self._num_missing(seq, num_tokens) - len(blocks) + kept + copied + headroom <= self._pool.num_reusable

    def num_needed(self, prompt: int, slots: int, width: int) -> int:
        """Blocks for `width` sequences of `slots` tokens each that begin with the same `prompt` tokens, and share no others."""
        shared = prompt // self._block_size
        return shared + width * (-(-slots // self._block_size) - shared)

    def num_for_beams(self, trunk: Sequence) -> int:
        """Blocks that the beams of a trunk take beyond its own, to compute the tokens that they have or are about to get."""
        if trunk.request.search is None:
            return 0
        slots = min(trunk.num_tokens + max(map(len, trunk.tails), default=1), trunk.request.max_tokens - 1)
        needed = self.num_needed(trunk.num_tokens, slots, trunk.request.width)
        return needed - -(-trunk.num_tokens // self._block_size)

    def find_start(self, seq: Sequence, sibling: Sequence | None) -> Start | None:
        """What `seq`, which holds nothing, can begin with: published blocks, or those of `sibling`, a running sequence with the
        same prompt. None: more is just being computed, and will be here soon.
        """
        prefix = self.match_prefix(seq)
        if prefix is None:
            return None
        found = Start(prefix, len(prefix) * self._block_size)
        if sibling is None or sibling.num_published is None:  # of an older state of the model
            return found
        shared = len(seq.request.prompt) - 1  # the last token's logits are needed
        if sibling.num_computed_tokens < shared:
            return None
        if shared <= found.num_tokens:
            return found
        return Start(sibling.block_table[: -(-shared // self._block_size)], shared)

    def match_prefix(self, seq: Sequence) -> tuple[int, ...] | None:
        """The published blocks that `seq`, which holds none, begins with; the block of its last token is never among them.

        None: a running sequence is just computing the next one, which will be here soon.
        """
        if not self._shares or seq.request.prompt_logprobs is not None:  # those take every position's logits
            return ()
        found: list[int] = []
        usable = (seq.num_tokens - 1) // self._block_size
        for name in self._names(seq, usable)[:usable]:
            block = self._pool.lookup(name.key, name)
            if block is None:
                return None if name.key in self._coming else tuple(found)
            found.append(block)
        return tuple(found)

    def adopt(self, seq: Sequence, start: Start) -> None:
        """Let `seq`, which is being admitted, begin with what `find_start` has just found."""
        self._pool.incref(start.blocks)
        seq.num_published = start.num_tokens // self._block_size if self._shares else 0
        self._hold(seq, *start)

    def branch(self, seqs: Iterable[Sequence], branches: Iterable[tuple[Sequence, Sequence]]) -> None:
        """Put new sequences in the place of `seqs`: (parent, branch) each, where the branch takes the parent's blocks.

        Several may hold a block that is not full; the first to write to it gets a copy, see `reserve`.
        """
        for parent, seq in branches:
            seq.num_computed_tokens = parent.num_computed_tokens
            seq.block_table = parent.block_table[: -(-seq.num_computed_tokens // self._block_size)]
            self._pool.incref(seq.block_table)
            seq.num_published = parent.num_published
            self._holders.add(seq)
        for seq in seqs:
            self.release(seq)

    def num_host_blocks_for(self, seq: Sequence) -> int | None:
        """How many host blocks `move_out` takes; None: there are not so many now."""
        needed = -(-seq.num_computed_tokens // self._block_size)
        return needed if self._host is not None and 0 < needed <= self._host.num_reusable else None

    def move_out(self, seq: Sequence) -> tuple[tuple[int, int], ...]:
        """Release `seq`'s blocks and keep what is in them in host blocks, for which there is room: (block, host block) each."""
        num_blocks = self.num_host_blocks_for(seq)
        host = None if self._host is None or num_blocks is None else self._host.allocate(num_blocks)
        if host is None:
            raise EngineDeadError(f"request {seq.request_id}: there is no room for it in the host's memory")
        pairs = tuple(zip(seq.block_table, host, strict=False))
        num_tokens, is_out_of_date = seq.num_computed_tokens, seq.num_published is None
        self.release(seq)
        seq.host_blocks, seq.num_swapped_tokens = host, num_tokens
        seq.num_published = None if is_out_of_date else 0
        self._moved.add(seq)
        return pairs

    def move_in(self, seq: Sequence) -> tuple[tuple[int, int], ...]:
        """Give `seq` blocks for what is in its host blocks, as `can_reserve` said: (host block, block) each."""
        blocks = self._pool.allocate(len(seq.host_blocks))
        if blocks is None:
            raise EngineDeadError(f"request {seq.request_id}: there is no room for it in the KV cache")
        pairs = tuple(zip(seq.host_blocks, blocks, strict=True))
        num_tokens = seq.num_swapped_tokens
        self._leave_host(seq)
        self._hold(seq, blocks, num_tokens)
        return pairs

    def publish(self, seq: Sequence) -> None:
        """Let others find the blocks that `seq` has filled by now."""
        full = seq.num_computed_tokens // self._block_size
        if not self._shares or seq.num_published is None or full <= seq.num_published:
            return
        for i in range(seq.num_published, full):
            name = self._names(seq, full)[i]
            self._pool.publish(seq.block_table[i], name.key, name)
            self._no_longer_coming(seq, name)
        seq.num_published = full

    def forget_prefixes(self) -> None:
        """Let nobody find what was computed up to now: it is out of date. Who holds such blocks goes on with them."""
        self._pool.unpublish_all()
        self._coming.clear()
        for seq in (*self._holders, *self._moved):
            seq.num_published = None

    def reserve(self, seq: Sequence, num_tokens: int) -> tuple[tuple[int, int], ...] | None:
        """Make `seq`'s block table cover `num_tokens` tokens, in blocks that it can write to from `num_computed_tokens` on.

        Returns the blocks to copy before that, (block, its copy) each: others hold what it would write to (copy-on-write).
        None, nothing changed: not now. Raises RequestTooLongError if the whole pool would not do.
        """
        missing = self._num_missing(seq, num_tokens)
        first = seq.num_computed_tokens // self._block_size
        copied = first < len(seq.block_table) and self._pool.ref_count(seq.block_table[first]) > 1
        if missing <= 0 and not copied:
            return ()
        if num_tokens > self.num_slots:
            raise RequestTooLongError(f"num_tokens: {num_tokens} do not fit the KV cache, which holds {self.num_slots}")
        blocks = self._pool.allocate(max(0, missing) + copied)
        if blocks is None:
            return None
        self._holders.add(seq)
        table = seq.block_table
        if not copied:
            seq.block_table = table + blocks
            return ()
        seq.block_table = (*table[:first], blocks[0], *table[first + 1 :], *blocks[1:])
        self._pool.release(table[first : first + 1])
        return ((table[first], blocks[0]),)

    def release(self, seq: Sequence) -> None:
        """Give `seq`'s blocks back; nothing of it counts as computed any more."""
        if seq.host_blocks:
            self._leave_host(seq)
            seq.num_published = 0
        if seq not in self._holders:
            return
        self._holders.remove(seq)
        if seq.num_published is not None and seq.names is not None:
            for name in self._names(seq, 0)[seq.num_published :]:
                self._no_longer_coming(seq, name)
        self._pool.release(seq.block_table)
        seq.block_table = ()
        seq.num_computed_tokens = 0
        seq.num_published = 0

    def check(self) -> None:
        """Raise EngineDeadError unless the pool is sound and the tables are what it counts."""
        self._pool.check()
        held = Counter(block for seq in self._holders for block in seq.block_table)
        if len(held) != self._pool.num_owned or any(self._pool.ref_count(block) != n for block, n in held.items()):
            raise EngineDeadError("KV cache: the block tables are not what the pool counts")
        for seq in self._holders:
            if seq.num_computed_tokens > len(seq.block_table) * self._block_size:
                raise EngineDeadError(f"KV cache: request {seq.request_id} has more computed tokens than slots")
        if self._host is not None:
            self._host.check()
            if self._host.num_owned != sum(len(seq.host_blocks) for seq in self._moved):
                raise EngineDeadError("KV cache: the host blocks are not what the pool counts")
        if not self._holders >= set(self._coming.values()):
            raise EngineDeadError("KV cache: blocks are awaited from a sequence that does not run")

    def _hold(self, seq: Sequence, blocks: tuple[int, ...], num_tokens: int) -> None:
        seq.block_table = blocks
        seq.num_computed_tokens = num_tokens
        self._holders.add(seq)
        if self._shares and seq.num_published is not None:
            for name in self._names(seq, seq.num_tokens // self._block_size)[num_tokens // self._block_size :]:
                self._coming.setdefault(name.key, seq)

    def _leave_host(self, seq: Sequence) -> None:
        assert self._host is not None  # or it would have no host blocks
        self._host.release(seq.host_blocks)
        self._moved.remove(seq)
        seq.host_blocks, seq.num_swapped_tokens = (), 0

    def _names(self, seq: Sequence, num_blocks: int) -> list[BlockName]:
        """Of `seq`'s first `num_blocks` blocks at least."""
        if seq.names is None:
            seq.names = PrefixNames(self._block_size, seq.request.service.cache_salt)
        return seq.names.upto(num_blocks, seq.tokens)

    def _no_longer_coming(self, seq: Sequence, name: BlockName) -> None:
        if self._coming.get(name.key) is seq:
            del self._coming[name.key]

    def _num_missing(self, seq: Sequence, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size) - len(seq.block_table)
