"""KVManager: the memory of sequences in blocks of the KV cache, and what they share of it.

Full blocks are published under a chained hash of all tokens up to their end, after the step that wrote them succeeded. A
sequence that is admitted takes the published blocks that it begins with as its own, all but the one with its last token, whose
logits it needs. (The prefix cache of vLLM, Kwon et al., SOSP 2023, section 4.4.)
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from hf_cb.core.block_pool import BlockPool
from hf_cb.core.block_tables import BlockTables
from hf_cb.core.capacity import Capacity
from hf_cb.core.holding import Start
from hf_cb.core.output import NO_MOVES, Moves, RowMemory
from hf_cb.core.prefix import BlockName, PrefixNames
from hf_cb.core.reach import ALL, Reach
from hf_cb.core.sequence import Sequence
from hf_cb.errors import EngineDeadError, InvalidArgumentError, RequestTooLongError


class KVManager:
    """Grows and releases block tables over `pool`, whose blocks hold `block_size` tokens each.

    `shares`: whether what one sequence has computed is used by others. `num_host_blocks`: of the host, to which a sequence that
    waits can be moved. `reaches`: one for each group of layers. `max_step_tokens`: that one sequence can get in a step.

    The scheduler knows no blocks: it asks whether a sequence has room, lets it in, lets it grow, and lets it go. A step writes
    where `reserve` has made room. Until `commit`, nobody else is given what it wrote. What is to be copied before a step
    computes comes back as `Moves`, once. Owned by the scheduler, and not thread-safe, except `capacity`.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        shares: bool = False,
        num_host_blocks: int = 0,
        reaches: Items[Reach] = (ALL,),
        max_step_tokens: int = 0,
    ) -> None:
        if block_size < 1:
            raise InvalidArgumentError(f"block_size: takes an integer >= 1; got {block_size}")
        self._pool = pool
        self._block_size = block_size
        self._shares = shares
        self.tables = BlockTables(pool.num_blocks, block_size, reaches, max_step_tokens)
        self.num_groups = self.tables.num_groups  # of layers that keep a token each: a stored token counts once for each
        self.capacity = Capacity(self.tables)
        self._host = BlockPool(num_host_blocks) if num_host_blocks else None
        self._moved: set[Sequence] = set()  # those that wait in host blocks
        self._holders: set[Sequence] = set()
        self._coming: dict[bytes, Sequence] = {}  # key of a block -> the running sequence that is to publish it

    @property
    def blocks_used(self) -> int:
        """Blocks that sequences hold now."""
        return self._pool.num_owned

    @property
    def tokens_stored(self) -> int:
        """Tokens whose keys and values are in those blocks, counted once for each group."""
        size, groups = self._block_size, self.tables.num_groups
        # By the last block: the only one that can be both shared and not full.
        unused = {
            seq.held.block_table[-1]: len(seq.held.block_table) // groups * size - seq.num_computed_tokens
            for seq in self._holders
            if seq.held.block_table
        }
        return self._pool.num_owned * size - sum(unused.values()) * groups

    def can_admit(self, seq: Sequence, start: Start | None, num_running: int, is_crowded: bool) -> bool:
        """Whether `seq` has room for all of its tokens, and for those of its beams, beside what `num_running` sequences are
        about to take; `is_crowded`: one of them was preempted lately. `start`: None for one that was moved out."""
        # Blocks for all its tokens, not just for the first chunk: one that starts what it can't end only wastes work.
        beside = self.capacity.headroom(num_running, is_crowded) + self.capacity.num_for_beams(seq)
        return self.can_reserve(seq, seq.num_tokens, start, beside)

    def can_reserve(self, seq: Sequence, num_tokens: int, start: Start | None = None, headroom: int = 0) -> bool:
        """Whether `reserve` would succeed now, after `adopt(seq, start)`, and leave `headroom` blocks."""
        blocks, num_held = ((), 0) if start is None else start[:2]
        kept = sum(self._pool.ref_count(block) == 0 for block in self.tables.held(blocks))
        copied = self.tables.num_groups if num_held % self._block_size else 0
        missing = self._num_missing(seq, num_tokens) - len(blocks) // self.tables.num_groups
        return self.tables.num_missing(missing, blocks) + kept + copied + headroom <= self._pool.num_reusable

    def find_start(self, seq: Sequence, sibling: Sequence | None) -> Start | None:
        """What `seq`, which holds nothing, can begin with: what was published, or what `sibling` has, a running sequence with
        the same prompt. None: more is just being computed, and will be here soon."""
        found = self.match_prefix(seq)
        if found is None:
            return None
        if sibling is None or sibling.held.num_published is None:  # of an older state of the model
            return found
        if seq.request.prompt_logprobs is not None:  # those take every position's logits
            return found
        shared = len(seq.request.prompt) - 1  # the last token's logits are needed
        if sibling.num_computed_tokens < shared:
            return None
        if shared <= found.num_tokens:
            return found
        blocks = self.tables.seen_from(shared, self.tables.upto(sibling.held.block_table, shared))
        return found if blocks is None else Start(blocks, shared)

    def match_prefix(self, seq: Sequence, can_start: Callable[[BlockName], bool] | None = None) -> Start | None:
        """The published blocks that `seq`, which holds none, can begin with; never the one of its last token.

        None: a running sequence is just computing the next one, which will be here soon. `can_start`: whether there is all
        that it takes beside the blocks to go on after the one of this name; then nothing is waited for.
        """
        nothing = Start((), 0)
        if not self._shares or seq.request.prompt_logprobs is not None:  # those take every position's logits
            return nothing
        usable = (seq.num_tokens - 1) // self._block_size
        names = self._names(seq, usable)[:usable]
        table: list[int] = []  # `gone` where a group that looks back only so far has no block
        best, last_gone = 0, [-1] * self.tables.num_groups
        for i, name in enumerate(names):
            blocks = [self._lookup(g, name) for g in range(self.tables.num_groups)]
            table += blocks
            last_gone = [i if block == self.tables.gone else last for block, last in zip(blocks, last_gone, strict=True)]
            position = (i + 1) * self._block_size
            seen = [reach.first(position) // self._block_size for reach in self.tables.reaches]
            if all(last < first for last, first in zip(last_gone, seen, strict=True)):
                best = i + 1 if can_start is None or can_start(name) else best
            elif any(reach.span is None and last >= 0 for last, reach in zip(last_gone, self.tables.reaches, strict=True)):
                break
        if can_start is None and best < usable and names[best].key in self._coming:
            return None
        found = self.tables.seen_from(best * self._block_size, tuple(table[: best * self.tables.num_groups]))
        assert found is not None  # that is what `best` says
        return Start(found, best * self._block_size)

    def _lookup(self, group: int, name: BlockName) -> int:
        block = self._pool.lookup(self._key(group, name), name)
        return self.tables.gone if block is None else block

    def _key(self, group: int, name: BlockName) -> bytes | tuple[int, bytes]:
        return name.key if self.tables.num_groups == 1 else (group, name.key)

    def admit(self, seq: Sequence, start: Start | None) -> Moves:
        """Let `seq` begin with what `find_start` has just found; None: with what was moved out of it."""
        if start is None:
            return Moves(swap_in=self.move_in(seq))
        self.adopt(seq, start)
        return NO_MOVES

    def adopt(self, seq: Sequence, start: Start) -> None:
        """Let `seq`, which is being admitted, begin with what `find_start` has just found."""
        self._pool.incref(self.tables.held(start.blocks))
        seq.held.num_published = start.num_tokens // self._block_size if self._shares else 0
        self._hold(seq, start.blocks, start.num_tokens)

    def branch(self, seqs: Iterable[Sequence], branches: Iterable[tuple[Sequence, Sequence]]) -> None:
        """Put new sequences in the place of `seqs`: (parent, branch) each, where the branch has what its parent has.

        Several may hold a block that is not full; the first to write to it gets a copy, see `reserve`.
        """
        for parent, seq in branches:
            seq.num_computed_tokens = parent.num_computed_tokens
            seq.held.block_table = self.tables.upto(parent.held.block_table, seq.num_computed_tokens)
            self._pool.incref(self.tables.held(seq.held.block_table))
            seq.held.num_shed = parent.held.num_shed
            seq.held.num_published = parent.held.num_published
            self._holders.add(seq)
        for seq in seqs:
            self.release(seq)

    def cost_of_move(self, seq: Sequence) -> int | None:
        """Blocks to copy to move `seq` out; None: there is no room for them now, or nothing to move."""
        needed = self._num_to_move(seq)
        return needed if self._host is not None and 0 < needed <= self._host.num_reusable else None

    def _num_to_move(self, seq: Sequence) -> int:
        return len(self.tables.held(self.tables.upto(seq.held.block_table, seq.num_computed_tokens)))

    def move_out(self, seq: Sequence) -> Moves:
        """Release what `seq` holds, and keep its content on the host."""
        host = None if self._host is None else self._host.allocate(self._num_to_move(seq))
        if host is None:
            raise EngineDeadError(f"request {seq.request_id}: there is no room for it in the host's memory")
        table = self.tables.upto(seq.held.block_table, seq.num_computed_tokens)
        pairs = tuple(zip(self.tables.held(table), host, strict=True))
        places = iter(host)
        kept = tuple(None if block == self.tables.gone else next(places) for block in table)
        num_tokens, is_out_of_date = seq.num_computed_tokens, seq.held.num_published is None
        self.release(seq)
        seq.held.host_blocks, seq.held.num_swapped_tokens = kept, num_tokens
        seq.held.num_published = None if is_out_of_date else 0
        self._moved.add(seq)
        return Moves(swap_out=pairs)

    def move_in(self, seq: Sequence) -> tuple[tuple[int, int], ...]:
        """Give `seq` blocks for what is in its host blocks, as `can_reserve` said: (host block, block) each."""
        kept = [host for host in seq.held.host_blocks if host is not None]
        blocks = self._pool.allocate(len(kept))
        if blocks is None:
            raise EngineDeadError(f"request {seq.request_id}: there is no room for it in the KV cache")
        places = iter(blocks)
        table = tuple(self.tables.gone if host is None else next(places) for host in seq.held.host_blocks)
        num_tokens = seq.held.num_swapped_tokens
        self._leave_host(seq)
        self._hold(seq, table, num_tokens)
        return tuple(zip(kept, blocks, strict=True))

    def row(self, seq: Sequence) -> RowMemory:
        """What a step's row shows of it to the runtime."""
        return RowMemory(seq.held.block_table)

    def advance(self, seq: Sequence) -> None:
        """A step has brought `seq` to `num_computed_tokens`, or will without being tried again: what it read may go. Blocks
        stay."""

    def commit(self, seq: Sequence, num_tokens: int) -> None:
        """The step that wrote `seq`'s tokens up to `num_tokens` has succeeded: share them, give back what it sees no more."""
        self.publish(seq, num_tokens)
        self.shed(seq, num_tokens)

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Let others find the blocks that `seq` has filled with its first `num_tokens` tokens."""
        full = num_tokens // self._block_size
        if not self._shares or seq.held.num_published is None or full <= seq.held.num_published:
            return
        for i in range(seq.held.num_published, full):
            name = self._names(seq, full)[i]
            for g, block in enumerate(seq.held.block_table[i * self.tables.num_groups : (i + 1) * self.tables.num_groups]):
                if block != self.tables.gone:
                    self._pool.publish(block, self._key(g, name), name)
            self._no_longer_coming(seq, name)
        seq.held.num_published = full

    def shed(self, seq: Sequence, position: int) -> None:
        """Give back those of `seq`'s blocks that no token from `position` on can see. They may still be found by others."""
        table: list[int] | None = None
        num_shed, groups = [], self.tables.num_groups
        for place, (g, reach) in enumerate(self.tables.short):
            before = seq.held.num_shed[place] if seq.held.num_shed else 0
            first = min(reach.first(position) // self._block_size, len(seq.held.block_table) // groups)
            num_shed.append(max(before, first))
            if first > before:
                table = list(seq.held.block_table) if table is None else table
                places = slice(before * groups + g, first * groups, groups)
                self._pool.release(self.tables.held(table[places]))
                table[places] = [self.tables.gone] * (first - before)
        if table is not None:
            seq.held.block_table, seq.held.num_shed = tuple(table), tuple(num_shed)

    def forget_prefixes(self) -> None:
        """Let nobody find what was computed up to now: it is out of date. Who holds some of it goes on with that."""
        self._pool.unpublish_all()
        self._coming.clear()
        for seq in (*self._holders, *self._moved):
            seq.held.num_published = None

    def reserve(self, seq: Sequence, num_tokens: int) -> Moves | None:
        """Make room for `seq`'s first `num_tokens` tokens, which it can write to from `num_computed_tokens` on. None, nothing
        changed: not now. Raises RequestTooLongError if the whole memory would not do.

        Where others hold a block that it would write to, it gets a copy (copy-on-write).
        """
        groups = self.tables.num_groups
        missing = max(0, self._num_missing(seq, num_tokens)) * groups
        first, table = seq.num_computed_tokens // self._block_size * groups, seq.held.block_table
        written = table[first : first + groups]
        copied = self._pool.shared(written)
        if not missing and not copied:
            return NO_MOVES
        if num_tokens > (most := self.tables.num_slots):
            raise RequestTooLongError(f"num_tokens: {num_tokens} do not fit the KV cache, which holds {most}")
        blocks = self._pool.allocate(missing + len(copied))
        if blocks is None:
            return None
        self._holders.add(seq)
        copies = dict(zip(copied, blocks, strict=False))
        kept = [copies.get(block, block) for block in written]
        seq.held.block_table = (*table[:first], *kept, *table[first + groups :], *blocks[len(copied) :])
        self._pool.release(copied)
        return Moves(copies=tuple(copies.items()))

    def release(self, seq: Sequence) -> None:
        """Give back all that `seq` holds, wherever it is; nothing of it counts as computed any more."""
        if seq.held.host_blocks:
            self._leave_host(seq)
            seq.held.num_published = 0
        if seq not in self._holders:
            return
        self._holders.remove(seq)
        if seq.held.num_published is not None and seq.held.names is not None:
            for name in self._names(seq, 0)[seq.held.num_published :]:
                self._no_longer_coming(seq, name)
        self._pool.release(self.tables.held(seq.held.block_table))
        seq.held.block_table = ()
        seq.held.num_shed = ()
        seq.num_computed_tokens = 0
        seq.held.num_published = 0

    def check(self) -> None:
        """Raise EngineDeadError unless the books are sound."""
        self._pool.check()
        held = Counter(block for seq in self._holders for block in self.tables.held(seq.held.block_table))
        if len(held) != self._pool.num_owned or any(self._pool.ref_count(block) != n for block, n in held.items()):
            raise EngineDeadError("KV cache: the block tables are not what the pool counts")
        for seq in self._holders:
            stretches, left_over = divmod(len(seq.held.block_table), self.tables.num_groups)
            if left_over or seq.num_computed_tokens > stretches * self._block_size:
                raise EngineDeadError(f"KV cache: request {seq.request_id} has more computed tokens than slots")
            if self.tables.seen_from(seq.num_computed_tokens, seq.held.block_table) is None:
                raise EngineDeadError(f"KV cache: request {seq.request_id} has given back blocks that it needs")
        if self._host is not None:
            self._host.check()
            kept = itertools.chain.from_iterable(seq.held.host_blocks for seq in self._moved)
            if self._host.num_owned != sum(host is not None for host in kept):
                raise EngineDeadError("KV cache: the host blocks are not what the pool counts")
        if not self._holders >= set(self._coming.values()):
            raise EngineDeadError("KV cache: blocks are awaited from a sequence that does not run")

    def _hold(self, seq: Sequence, blocks: tuple[int, ...], num_tokens: int) -> None:
        seq.held.block_table = blocks
        seq.num_computed_tokens = num_tokens
        self._holders.add(seq)
        if self._shares and seq.held.num_published is not None:
            for name in self._names(seq, seq.num_tokens // self._block_size)[num_tokens // self._block_size :]:
                self._coming.setdefault(name.key, seq)

    def _leave_host(self, seq: Sequence) -> None:
        assert self._host is not None  # or it would have no host blocks
        self._host.release([host for host in seq.held.host_blocks if host is not None])
        self._moved.remove(seq)
        seq.held.host_blocks, seq.held.num_swapped_tokens = (), 0

    def _names(self, seq: Sequence, num_blocks: int) -> list[BlockName]:
        """Of `seq`'s first `num_blocks` blocks at least."""
        if seq.held.names is None:
            seq.held.names = PrefixNames(self._block_size, seq.request.service.cache_salt)
        return seq.held.names.upto(num_blocks, seq.tokens)

    def _no_longer_coming(self, seq: Sequence, name: BlockName) -> None:
        if self._coming.get(name.key) is seq:
            del self._coming[name.key]

    def _num_missing(self, seq: Sequence, num_tokens: int) -> int:
        """Stretches of `block_size` tokens."""
        return self.tables.stretches(num_tokens) - len(seq.held.block_table) // self.tables.num_groups
