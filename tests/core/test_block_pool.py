import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hf_cb.core.block_pool import BlockPool
from hf_cb.errors import EngineDeadError, InvalidArgumentError


def test_blocks_are_handed_out_once_each():
    pool = BlockPool(4)
    assert pool.allocate(3) == (0, 1, 2)
    assert pool.allocate(2) is None
    assert (pool.num_owned, pool.num_reusable) == (3, 1)  # a refusal changes nothing
    assert pool.allocate(1) == (3,)
    assert pool.allocate(0) == ()
    pool.check()


@pytest.mark.parametrize("n", [-1, 5])
def test_what_can_never_be_allocated_raises(n):
    with pytest.raises(InvalidArgumentError, match=r"^n: takes 0 to 4 blocks"):
        BlockPool(4).allocate(n)


def test_a_pool_has_at_least_one_block():
    with pytest.raises(InvalidArgumentError, match=r"^num_blocks: "):
        BlockPool(0)


def test_a_shared_block_is_reusable_when_its_last_holder_releases_it():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.incref(blocks)
    pool.release(blocks)
    assert pool.allocate(1) is None
    pool.release(blocks)
    assert pool.allocate(1) == blocks


def test_blocks_without_content_are_reused_before_cached_ones():
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    pool.publish(blocks[0], "a")
    pool.release(blocks)
    assert pool.num_reusable == 4
    assert set(pool.allocate(3)) == set(blocks[1:])
    assert pool.lookup("a") == blocks[0]
    assert pool.allocate(1) == blocks[:1]
    assert pool.lookup("a") is None  # evicted by reuse
    pool.check()


def test_the_tail_of_the_least_recently_held_sequence_is_evicted_first():
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for block in (*old, *new):
        assert pool.publish(block, f"content {block}")
    pool.release(old)
    pool.release(new)
    assert [pool.allocate(1)[0] for _ in range(4)] == [old[1], old[0], new[1], new[0]]


def test_holding_a_cached_block_again_saves_it_and_renews_its_turn():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, "first")
    pool.publish(second, "second")
    pool.release([first])
    pool.release([second])
    pool.incref([pool.lookup("first")])
    assert pool.num_owned == 1
    pool.release([first])
    assert pool.allocate(1) == (second,)
    assert pool.lookup("first") == first
    pool.check()


def test_the_same_content_is_published_once():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    assert pool.publish(first, "same")
    assert pool.publish(first, "same")
    assert not pool.publish(second, "same")
    assert pool.lookup("same") == first
    pool.release([first, second])
    pool.check()


def test_misuse_is_a_broken_invariant():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, "a")
    with pytest.raises(EngineDeadError, match="cannot be published"):
        pool.publish(block, "b")
    pool.release([block])
    with pytest.raises(EngineDeadError, match="nobody holds it"):
        pool.release([block])
    with pytest.raises(EngineDeadError, match="cannot be published"):
        pool.publish(block, "a")
    with pytest.raises(EngineDeadError, match="is free"):
        pool.incref([1])


def _lose_a_block(pool):
    pool._free.pop()


def _free_it_twice(pool):
    pool._free.append(pool._free[-1])


def _count_a_free_block(pool):
    pool._blocks[pool._free[0]].ref_count = 1


def _forget_a_key(pool):
    pool._published.clear()


def _misplace_a_cached_block(pool):
    block, _ = pool._cached.popitem()
    pool._free.append(block)


@pytest.mark.parametrize(
    "damage", [_lose_a_block, _free_it_twice, _count_a_free_block, _forget_a_key, _misplace_a_cached_block]
)
def test_check_sees_damage(damage):
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.publish(blocks[0], "a")
    pool.release(blocks[:1])
    pool.check()
    damage(pool)
    with pytest.raises(EngineDeadError):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model: a list of holders, and the content of each block as the last writer left it."""

    @initialize(num_blocks=st.integers(1, 6))
    def make(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.holders: list[tuple[int, ...]] = []
        self.content: dict[int, str] = {}  # block -> key

    @rule(n=st.integers(0, 6))
    def allocate(self, n):
        if n > self.pool.num_blocks:
            return
        held = {block for blocks in self.holders for block in blocks}
        blocks = self.pool.allocate(n)
        assert (blocks is None) == (n > self.pool.num_blocks - len(held))
        if blocks is not None:
            assert len(set(blocks)) == n
            assert held.isdisjoint(blocks)
            self.holders.append(blocks)
            for block in blocks:
                self.content.pop(block, None)

    @rule(data=st.data())
    def release(self, data):
        if self.holders:
            self.pool.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @rule(key=st.sampled_from("abc"))
    def hold_what_is_found(self, key):
        block = self.pool.lookup(key)
        if block is not None:
            self.pool.incref([block])
            self.holders.append((block,))

    @rule(key=st.sampled_from("abc"), data=st.data())
    def publish(self, key, data):
        blank = sorted({block for blocks in self.holders for block in blocks} - self.content.keys())
        if blank:
            block = data.draw(st.sampled_from(blank))
            known = key in self.content.values()
            assert self.pool.publish(block, key) == (not known)
            if not known:
                self.content[block] = key

    @rule()
    def unpublish_all(self):
        self.pool.unpublish_all()
        self.content.clear()

    @rule(key=st.sampled_from("abc"))
    def other_content_under_the_same_key_is_not_found(self, key):
        assert self.pool.lookup(key, "something else") is None

    @invariant()
    def is_sound(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        held = [block for blocks in self.holders for block in blocks]
        assert self.pool.num_owned == len(set(held))
        assert all(self.pool.ref_count(block) == held.count(block) for block in range(self.pool.num_blocks))
        assert {key: self.pool.lookup(key) for key in "abc" if self.pool.lookup(key) is not None} == {
            key: block for block, key in self.content.items()
        }


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
