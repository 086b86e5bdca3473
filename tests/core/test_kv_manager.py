import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_cb.core.block_pool import BlockPool
from hf_cb.core.kv_manager import KVManager
from hf_cb.core.output import NO_MOVES
from hf_cb.core.sequence import Sequence
from hf_cb.errors import EngineDeadError, InvalidArgumentError, RequestTooLongError
from hf_cb.request import Request, Service


def _sequence(num_tokens: int = 1) -> Sequence:
    return Sequence(Request((0,) * num_tokens, max_new_tokens=1), arrival=0)


def table(kv: KVManager, seq: Sequence, num_tokens: int) -> tuple[int, ...]:
    assert kv.reserve(seq, num_tokens) == NO_MOVES  # nothing of it is anybody else's
    return seq.held.block_table


def test_a_table_grows_by_whole_blocks_and_only_when_it_must():
    kv, seq = KVManager(BlockPool(4), block_size=2), _sequence()
    assert table(kv, seq, 1) == table(kv, seq, 2) == seq.held.block_table
    head = seq.held.block_table
    assert len(head) == 1
    assert len(table(kv, seq, 5)) == 3
    assert seq.held.block_table[:1] == head  # what is written stays where it is
    assert len(table(kv, seq, 1)) == 3  # never shrinks
    assert kv.blocks_used == 3
    kv.check()


def test_not_now_is_none_and_changes_nothing_and_never_is_an_error():
    kv, one, two = KVManager(BlockPool(2), block_size=2), _sequence(), _sequence()
    kv.reserve(one, 2)
    kv.reserve(two, 1)
    before = two.held.block_table
    assert not kv.can_reserve(two, 3)
    assert kv.reserve(two, 3) is None
    assert two.held.block_table == before
    with pytest.raises(RequestTooLongError, match=r"^num_tokens: 5 do not fit the KV cache, which holds 4$"):
        kv.reserve(two, 5)
    kv.release(one)
    assert kv.can_reserve(two, 3)
    assert kv.blocks_used == 1  # asking takes nothing
    assert len(table(kv, two, 3)) == 2


def test_released_sequences_start_anew():
    kv, seq = KVManager(BlockPool(2), block_size=2), _sequence(3)
    kv.reserve(seq, 3)
    seq.num_computed_tokens = 3
    assert (kv.blocks_used, kv.tokens_stored) == (2, 3)
    kv.release(seq)
    assert (kv.blocks_used, kv.tokens_stored, seq.num_computed_tokens, seq.held.block_table) == (0, 0, 0, ())
    kv.release(seq)  # one that holds nothing has nothing to give back
    kv.check()


def test_block_size_is_checked():
    with pytest.raises(InvalidArgumentError, match=r"^block_size: "):
        KVManager(BlockPool(1), 0)


def _share_a_block(one, two):
    two.held.block_table = one.held.block_table


def _lose_a_block(one, two):
    one.held.block_table = one.held.block_table[:1]


def _compute_too_much(one, two):
    one.num_computed_tokens = 5


@pytest.mark.parametrize("damage", [_share_a_block, _lose_a_block, _compute_too_much])
def test_check_sees_damage(damage):
    kv, one, two = KVManager(BlockPool(4), block_size=2), _sequence(4), _sequence(4)
    kv.reserve(one, 4)
    kv.reserve(two, 4)
    kv.check()
    damage(one, two)
    with pytest.raises(EngineDeadError):
        kv.check()


class KVMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 6), block_size=st.integers(1, 4))
    def make(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.kv = KVManager(BlockPool(num_blocks), block_size)
        self.sequences = [_sequence() for _ in range(4)]

    @rule(which=st.integers(0, 3), num_tokens=st.integers(0, 24))
    def reserve(self, which, num_tokens):
        seq = self.sequences[which]
        if num_tokens > self.num_blocks * self.block_size:
            with pytest.raises(RequestTooLongError):
                self.kv.reserve(seq, num_tokens)
            return
        before, can = seq.held.block_table, self.kv.can_reserve(seq, num_tokens)
        used = self.kv.blocks_used
        moves = self.kv.reserve(seq, num_tokens)
        assert moves == (NO_MOVES if can else None)
        if moves is None:
            assert seq.held.block_table == before
            assert self.kv.blocks_used == used
        else:
            assert len(seq.held.block_table) == max(len(before), -(-num_tokens // self.block_size))
            assert seq.held.block_table[: len(before)] == before
            seq.num_computed_tokens = num_tokens

    @rule(which=st.integers(0, 3))
    def release(self, which):
        self.kv.release(self.sequences[which])

    @invariant()
    def is_sound(self):
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        held = [block for seq in self.sequences for block in seq.held.block_table]
        assert len(held) == len(set(held)) == self.kv.blocks_used  # disjoint
        assert self.kv.tokens_stored == sum(seq.num_computed_tokens for seq in self.sequences)


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


class SharingMachine(RuleBasedStateMachine):
    """Sequences over two tokens share, move to the host and back, and are told to forget. What each block holds is written
    down as the tokens up to its end, so that a block in the wrong table, or one that was written over, is seen."""

    @initialize(num_blocks=st.integers(1, 8), block_size=st.integers(1, 3), num_host_blocks=st.integers(0, 4))
    def make(self, num_blocks, block_size, num_host_blocks):
        self.block_size, self.num_blocks = block_size, num_blocks
        self.kv = KVManager(BlockPool(num_blocks), block_size, shares=True, num_host_blocks=num_host_blocks)
        self.held: list[Sequence] = []
        self.moved: list[Sequence] = []
        self.blocks: dict[int, tuple] = {}  # block -> (age of the model, tokens up to its end)
        self.host: dict[int, tuple] = {}
        self.age = 0  # goes up when all is forgotten

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), salt=st.sampled_from([None, None, "a"]))
    def admit(self, tokens, salt):
        seq = Sequence(Request(tuple(tokens), max_new_tokens=9, service=Service(cache_salt=salt)), arrival=0)
        start = self.kv.find_start(seq, None)
        if start is None:
            assert self.held  # somebody is computing it
            return
        prefix = start.blocks
        assert len(prefix) * self.block_size < len(tokens)
        for i, block in enumerate(prefix):
            assert self.blocks[block] == (self.age, salt, tuple(tokens[: (i + 1) * self.block_size]))
        if seq.num_tokens > self.num_blocks * self.block_size or not self.kv.can_reserve(seq, seq.num_tokens, start):
            return
        self.kv.adopt(seq, start)
        assert self.kv.reserve(seq, seq.num_tokens) == NO_MOVES
        self.held.append(seq)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=st.integers(1, 9))
    def admit_a_fork(self, data, more):
        """One with the same prompt as one that runs, of which it takes all but the last token, wherever that ends."""
        sibling = data.draw(st.sampled_from(self.held))
        seq = Sequence(dataclasses.replace(sibling.request, max_new_tokens=more, request_id=-1), arrival=0)
        start = self.kv.find_start(seq, sibling)
        if start is None or not self.kv.can_reserve(seq, seq.num_tokens, start):
            return
        assert sibling.held.num_published is None or start.num_tokens == seq.num_tokens - 1
        self.kv.adopt(seq, start)
        self._copy(seq, self.kv.reserve(seq, seq.num_tokens).copies)
        self.held.append(seq)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tails=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def branch(self, data, tails):
        """Some of what is held goes on as others, that begin alike."""
        seq = data.draw(st.sampled_from(self.held))
        branches = [(seq, seq.branch(i, (token,))) for i, token in enumerate(tails)]
        self.kv.branch([seq], branches)
        self.held.remove(seq)
        self.held += [branch for _, branch in branches]

    def _copy(self, seq, copies):
        for block, copy in copies:
            assert copy in seq.held.block_table
            assert block not in seq.held.block_table
            age, salt, tokens = self.blocks[block]
            self.blocks[copy] = (age, salt, tokens[: seq.num_computed_tokens])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), num_tokens=st.integers(1, 9), then=st.integers(0, 1))
    def compute(self, data, num_tokens, then):
        seq = data.draw(st.sampled_from(self.held))
        start, end = seq.num_computed_tokens, min(seq.num_tokens, seq.num_computed_tokens + num_tokens)
        if end > self.num_blocks * self.block_size:
            return
        can = self.kv.can_reserve(seq, end)
        moves = self.kv.reserve(seq, end)
        if moves is None:
            return
        assert can or moves.copies
        self._copy(seq, moves.copies)
        for i in range(start // self.block_size, -(-end // self.block_size)):
            block = seq.held.block_table[i]
            assert sum(block in other.held.block_table for other in self.held) == 1  # what is written to is its own
            of = seq.tokens[: min(end, (i + 1) * self.block_size)]
            before = self.blocks.get(block, (None,))[0] if i * self.block_size < start else None
            age = self.age if before is None else before
            self.blocks[block] = (age if self._is_pure(seq, i) else -1, seq.request.service.cache_salt, tuple(of))
        seq.num_computed_tokens = end
        self.kv.publish(seq, seq.num_computed_tokens)
        if end == seq.num_tokens:
            seq.tokens.append(then)

    def _is_pure(self, seq, i):
        return all(self.blocks[block][0] == self.age for block in seq.held.block_table[:i])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        seq = data.draw(st.sampled_from(self.held))
        self.held.remove(seq)
        self.kv.release(seq)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def move_out(self, data):
        seq = data.draw(st.sampled_from(self.held))
        if self.kv.cost_of_move(seq) is None:
            return
        num_tokens = seq.num_computed_tokens
        for block, host in self.kv.move_out(seq).swap_out:
            self.host[host] = self.blocks[block]
        assert (seq.held.num_swapped_tokens, seq.num_computed_tokens, seq.held.block_table) == (num_tokens, 0, ())
        self.held.remove(seq)
        self.moved.append(seq)

    @precondition(lambda self: self.moved)
    @rule(data=st.data(), back=st.booleans())
    def move_in_or_end(self, data, back):
        seq = data.draw(st.sampled_from(self.moved))
        if back and not self.kv.can_reserve(seq, seq.held.num_swapped_tokens):
            return
        self.moved.remove(seq)
        if not back:
            self.kv.release(seq)
            return
        for host, block in self.kv.move_in(seq):
            self.blocks[block] = self.host.pop(host)
        self.held.append(seq)

    @rule()
    def forget(self):
        self.kv.forget_prefixes()
        self.age += 1

    @invariant()
    def is_sound(self):
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        for seq in self.held:
            for i, block in enumerate(seq.held.block_table[: -(-seq.num_computed_tokens // self.block_size)]):
                known = min(seq.num_computed_tokens, (i + 1) * self.block_size)
                assert self.blocks[block][1:] == (seq.request.service.cache_salt, tuple(seq.tokens[:known]))
        assert self.kv.blocks_used == len({block for seq in self.held for block in seq.held.block_table})

    def teardown(self):
        if hasattr(self, "kv"):
            for seq in (*self.held, *self.moved):
                self.kv.release(seq)
            self.kv.check()
            assert self.kv.blocks_used == self.kv.tokens_stored == 0


TestSharingMachine = SharingMachine.TestCase
TestSharingMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
