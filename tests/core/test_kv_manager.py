import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hf_cb.core.block_pool import BlockPool
from hf_cb.core.kv_manager import KVManager
from hf_cb.core.sequence import Sequence
from hf_cb.errors import EngineDeadError, InvalidArgumentError, RequestTooLongError
from hf_cb.request import Request


def _sequence(num_tokens: int = 1) -> Sequence:
    return Sequence(Request((0,) * num_tokens, max_new_tokens=1), arrival=0)


def test_a_table_grows_by_whole_blocks_and_only_when_it_must():
    kv, seq = KVManager(BlockPool(4), block_size=2), _sequence()
    assert len(kv.reserve(seq, 1)) == 1
    assert kv.reserve(seq, 2) is seq.block_table
    head = seq.block_table
    assert len(kv.reserve(seq, 5)) == 3
    assert seq.block_table[:1] == head  # what is written stays where it is
    assert len(kv.reserve(seq, 1)) == 3  # never shrinks
    assert kv.blocks_used == 3
    kv.check()


def test_not_now_is_none_and_changes_nothing_and_never_is_an_error():
    kv, one, two = KVManager(BlockPool(2), block_size=2), _sequence(), _sequence()
    kv.reserve(one, 2)
    kv.reserve(two, 1)
    table = two.block_table
    assert not kv.can_reserve(two, 3)
    assert kv.reserve(two, 3) is None
    assert two.block_table == table
    with pytest.raises(RequestTooLongError, match=r"^num_tokens: 5 do not fit the KV cache, which holds 4$"):
        kv.reserve(two, 5)
    kv.release(one)
    assert kv.can_reserve(two, 3)
    assert kv.blocks_used == 1  # asking takes nothing
    assert len(kv.reserve(two, 3)) == 2


def test_released_sequences_start_anew():
    kv, seq = KVManager(BlockPool(2), block_size=2), _sequence(3)
    kv.reserve(seq, 3)
    seq.num_computed_tokens = 3
    assert (kv.blocks_used, kv.tokens_stored) == (2, 3)
    kv.release(seq)
    assert (kv.blocks_used, kv.tokens_stored, seq.num_computed_tokens, seq.block_table) == (0, 0, 0, ())
    kv.release(seq)  # one that holds nothing has nothing to give back
    kv.check()


def test_block_size_is_checked():
    with pytest.raises(InvalidArgumentError, match=r"^block_size: "):
        KVManager(BlockPool(1), 0)


def _share_a_block(one, two):
    two.block_table = one.block_table


def _lose_a_block(one, two):
    one.block_table = one.block_table[:1]


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
        before, can = seq.block_table, self.kv.can_reserve(seq, num_tokens)
        used = self.kv.blocks_used
        table = self.kv.reserve(seq, num_tokens)
        assert (table is not None) == can
        if table is None:
            assert seq.block_table == before
            assert self.kv.blocks_used == used
        else:
            assert len(table) == max(len(before), -(-num_tokens // self.block_size))
            assert table[: len(before)] == before
            seq.num_computed_tokens = num_tokens

    @rule(which=st.integers(0, 3))
    def release(self, which):
        self.kv.release(self.sequences[which])

    @invariant()
    def is_sound(self):
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        held = [block for seq in self.sequences for block in seq.block_table]
        assert len(held) == len(set(held)) == self.kv.blocks_used  # disjoint
        assert self.kv.tokens_stored == sum(seq.num_computed_tokens for seq in self.sequences)


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
