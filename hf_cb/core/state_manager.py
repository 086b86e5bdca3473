"""StateManager: the memory of sequences of which some layers keep a state beside, or in the place of, keys and values.

A state, of a recurrent, convolutional or linear-attention layer, sums up all tokens before a position. It lies in a slot, which
is written once: a step reads one slot and leaves the state after its tokens in another. So a step can be computed again, beams
and samples of one prompt share a slot until they part, and a state is saved for later prompts by letting its slot be found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

from typing_extensions import override

from hf_cb.core.block_pool import BlockPool
from hf_cb.core.holding import Start
from hf_cb.core.kv_manager import KVManager
from hf_cb.core.output import Moves, RowMemory
from hf_cb.core.prefix import BlockName
from hf_cb.core.sequence import Sequence
from hf_cb.core.slot_pool import SlotPool
from hf_cb.errors import EngineDeadError


class StateManager(KVManager):
    """`slots`: of the states, at least two for each sequence that runs, so that none waits for one. What is left of them holds
    saved states, the least recently used of which goes first. `num_host_slots`: for sequences that were moved to the host.
    `slot_blocks`: how many blocks are as long to copy as a slot. The rest is for KVManager.

    States are saved where others are likely to begin: at the end of a prompt's last full block, where prompts part, and at the
    latest full block of an output, for the next turn of a chat.
    """

    def __init__(
        self, pool: BlockPool, slots: SlotPool, *args: Any, num_host_slots: int = 0, slot_blocks: int = 1, **kwargs: Any
    ) -> None:
        super().__init__(pool, *args, **kwargs)
        self.slots = slots
        self._host_slots = BlockPool(num_host_slots) if num_host_slots else None
        self._slot_blocks = slot_blocks
        self._saving: dict[Hashable, Sequence] = {}  # key of a state -> the running sequence that is to save it

    @override
    def find_start(self, seq: Sequence, sibling: Sequence | None) -> Start | None:
        end = seq.num_tokens if self._shares else len(seq.request.prompt)
        last = (end - 1) // self._block_size * self._block_size
        seq.held.saves = (last,) if last else ()
        if seq.request.prompt_logprobs is not None:
            return Start((), 0)
        if not self._shares:
            return self._start_with(sibling, last) if sibling is not None else Start((), 0)
        start = self.match_prefix(seq, lambda name: self.slots.lookup(name.key, name) is not None)
        assert start is not None
        parting = self._num_alike(seq)
        names = self._names(seq, parting)
        first = start.num_tokens // self._block_size
        if any(name.key in self._saving for name in names[first:parting]):
            return None
        if first < parting:
            seq.held.saves = tuple(sorted({parting * self._block_size, last}))
        return start._replace(state=self.slots.lookup(names[first - 1].key, names[first - 1])) if first else start

    def _num_alike(self, seq: Sequence) -> int:
        """How many of the blocks that `seq` fills before its last token are here already, or just being computed."""
        usable = (seq.num_tokens - 1) // self._block_size
        names = self._names(seq, usable)[:usable]
        is_known = (name.key in self._coming or self._lookup(0, name) != self.tables.gone for name in names)
        return next((i for i, known in enumerate(is_known) if not known), usable)

    def _start_with(self, sibling: Sequence, position: int) -> Start | None:
        """What a sequence begins with that has the same prompt: its saved state, where no others' are looked for."""
        nothing = Start((), 0)
        if sibling.held.num_published is None or not position:
            return nothing
        key = self._fork_key(sibling)
        if key in self._saving:
            return None
        state = self.slots.lookup(key)
        blocks = self.tables.seen_from(position, self.tables.upto(sibling.held.block_table, position))
        return nothing if state is None or blocks is None else Start(blocks, position, state)

    @override
    def admit(self, seq: Sequence, start: Start | None) -> Moves:
        moves = super().admit(seq, start)
        if start is None:
            assert self._host_slots is not None
            host, slot = seq.held.host_state, self._take_slot()
            assert host is not None
            self._host_slots.release([host])
            seq.held.host_state = None
            seq.held.states = ((seq.num_computed_tokens, slot),)
            return moves._replace(states_in=((host, slot),))
        if start.state is not None:
            self.slots.incref([start.state])
            seq.held.states = ((start.num_tokens, start.state),)
        seq.held.saves = tuple(position for position in seq.held.saves if position > start.num_tokens)
        for position in seq.held.saves:
            self._saving.setdefault(self._key_at(seq, position), seq)
        return moves

    def _take_slot(self) -> int:
        slots = self.slots.allocate(1)
        if slots is None:  # while a step is underway, what it saves is held beside what the next one writes
            for seq in self._holders:
                self._give_up_saving(seq, [position for position in seq.held.saves if position < seq.num_computed_tokens])
                self.advance(seq)
            slots = self.slots.allocate(1)
        if slots is None:
            raise EngineDeadError("states: every slot is held, though there are two for each sequence")
        return slots[0]

    @override
    def reserve(self, seq: Sequence, num_tokens: int) -> Moves | None:
        moves = super().reserve(seq, num_tokens)
        if moves is None or num_tokens <= self._latest(seq):
            return moves
        self._holders.add(seq)
        if self._shares and num_tokens % self._block_size == 0 and num_tokens not in seq.held.saves:
            seq.held.saves += (num_tokens,)
        for position in sorted(seq.held.saves):
            if seq.num_computed_tokens < position < num_tokens:
                self._reserve_save(seq, position)
        slot = self._take_slot()  # before its states are looked at: it may shorten them
        seq.held.states += ((num_tokens, slot),)
        return moves

    def _latest(self, seq: Sequence) -> int:
        """The position of the latest state that `seq` has or will write."""
        return seq.held.states[-1][0] if seq.held.states else 0

    def _reserve_save(self, seq: Sequence, position: int) -> None:
        """Let a state be saved within a step, if nobody has to go without a slot for that."""
        if self.slots.num_reusable > self.slots.num_blocks // 2:
            slot = self._take_slot()
            seq.held.states += ((position, slot),)
        else:
            self._give_up_saving(seq, [position])

    @override
    def row(self, seq: Sequence) -> RowMemory:
        done = seq.num_computed_tokens
        state = next((slot for position, slot in seq.held.states if position == done), None)
        return RowMemory(seq.held.block_table, state, tuple(pair for pair in seq.held.states if pair[0] > done))

    @override
    def advance(self, seq: Sequence) -> None:
        """Give back what was read, but for states that are to be saved once their step has succeeded."""
        done, saves = seq.num_computed_tokens, seq.held.saves
        states = seq.held.states
        if states and states[0][0] < done:
            self.slots.release([slot for position, slot in states if position < done and position not in saves])
            seq.held.states = tuple(pair for pair in states if pair[0] >= done or pair[0] in saves)

    @override
    def commit(self, seq: Sequence, num_tokens: int) -> None:
        super().commit(seq, num_tokens)
        due = [position for position in seq.held.saves if position <= num_tokens]
        if not due:
            return
        for position, slot in seq.held.states:
            if position in due:
                self._save(seq, position, slot)
        self._give_up_saving(seq, due)
        self.advance(seq)

    def _save(self, seq: Sequence, position: int, slot: int) -> None:
        """Let others find the state of `seq` after `position` tokens."""
        if seq.held.num_published is None:
            return
        key = self._key_at(seq, position)
        is_new = self.slots.publish(slot, key, self._name_at(seq, position) if self._shares else None)
        if is_new and position > len(seq.request.prompt):
            if seq.held.rolling is not None:  # one for each output: the next turn of its chat begins with the latest
                self.slots.unpublish(seq.held.rolling)
            seq.held.rolling = key

    def _give_up_saving(self, seq: Sequence, positions: Iterable[int]) -> None:
        for position in positions:
            key = self._key_at(seq, position)
            if self._saving.get(key) is seq:
                del self._saving[key]
        seq.held.saves = tuple(position for position in seq.held.saves if position not in positions)

    def _name_at(self, seq: Sequence, position: int) -> BlockName:
        index = position // self._block_size
        return self._names(seq, index)[index - 1]

    def _key_at(self, seq: Sequence, position: int) -> Hashable:
        return self._name_at(seq, position).key if self._shares else self._fork_key(seq)

    def _fork_key(self, seq: Sequence) -> Hashable:
        return ("fork", seq.request_id if seq.request.fork_of is None else seq.request.fork_of)

    @override
    def branch(self, seqs: Iterable[Sequence], branches: Iterable[tuple[Sequence, Sequence]]) -> None:
        pairs = list(branches)
        for parent, seq in pairs:
            state = self.row(parent).state
            assert state is not None
            self.slots.incref([state])
            seq.held.states = ((parent.num_computed_tokens, state),)
        super().branch(seqs, pairs)

    @override
    def cost_of_move(self, seq: Sequence) -> int | None:
        blocks = super().cost_of_move(seq)
        has_room = self._host_slots is not None and self._host_slots.num_reusable
        return blocks + self._slot_blocks if has_room and blocks is not None else None

    @override
    def move_out(self, seq: Sequence) -> Moves:
        slot = self.row(seq).state
        host = None if self._host_slots is None else self._host_slots.allocate(1)
        if host is None or slot is None:
            raise EngineDeadError(f"request {seq.request_id}: there is no room for its state in the host's memory")
        moves = super().move_out(seq)
        seq.held.host_state = host[0]
        return moves._replace(states_out=((slot, host[0]),))

    @override
    def release(self, seq: Sequence) -> None:
        if seq.held.host_state is not None:
            assert self._host_slots is not None
            self._host_slots.release([seq.held.host_state])
            seq.held.host_state = None
        if seq.held.saves:
            self._give_up_saving(seq, seq.held.saves)
        self.slots.release([slot for _, slot in seq.held.states])
        seq.held.states, seq.held.rolling = (), None
        super().release(seq)

    @override
    def forget_prefixes(self) -> None:
        super().forget_prefixes()
        self.slots.unpublish_all()
        self._saving.clear()

    @override
    def check(self) -> None:
        super().check()
        self.slots.check()
        held = Counter(slot for seq in self._holders for _, slot in seq.held.states)
        if len(held) != self.slots.num_owned or any(self.slots.ref_count(slot) != n for slot, n in held.items()):
            raise EngineDeadError("states: the slots that sequences hold are not what the pool counts")
        for seq in self._holders:
            if seq.num_computed_tokens and self.row(seq).state is None:
                raise EngineDeadError(f"states: request {seq.request_id} has none after {seq.num_computed_tokens} tokens")
        if self._host_slots is not None:
            self._host_slots.check()
            if self._host_slots.num_owned != sum(seq.held.host_state is not None for seq in self._moved):
                raise EngineDeadError("states: the host's slots are not what the pool counts")
        if not self._holders >= set(self._saving.values()):
            raise EngineDeadError("states: one is awaited from a sequence that does not run")
