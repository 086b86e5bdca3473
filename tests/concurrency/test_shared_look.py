"""One look for all who wait for it, and none that began before its caller came."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hf_cb.continuous import SharedLook


class Slow:
    """A look that lasts as long as it is wanted; what is there to see is `truth`, when it begins."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.looks = 0
        self.truth: bool | Exception = True

    def __call__(self) -> bool:
        seen, self.looks = self.truth, self.looks + 1
        self.begun.release()
        assert self.may_end.acquire(timeout=20)
        if isinstance(seen, Exception):
            raise seen
        return seen


@pytest.fixture
def slow() -> Slow:
    return Slow()


def test_who_comes_during_a_look_gets_one_that_began_later(slow: Slow) -> None:
    look = SharedLook()
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(look, slow)
        assert slow.begun.acquire(timeout=20)
        slow.truth = False
        others = [pool.submit(look, slow) for _ in range(8)]
        slow.may_end.release(9)
        assert first.result(20) is True
        assert [other.result(20) for other in others] == 8 * [False]  # the first one saw what was there before


def test_those_who_wait_share_one(slow: Slow) -> None:
    """All of them read the count of looks before any of them may look."""
    look = SharedLook()
    counted = threading.Barrier(8)

    slow.may_end.release(100)
    assert look(slow) is True
    before = slow.looks

    class Gate:
        """A lock that lets nobody in before all have come."""

        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            counted.wait(20)
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    look._lock = Gate()  # type: ignore[assignment]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: look(slow), range(8))) == 8 * [True]
    assert slow.looks == before + 1


def test_calls_one_after_another_look_each_for_themselves(slow: Slow) -> None:
    """And what one raises, no other does."""
    slow.may_end.release(100)
    look = SharedLook()
    for truth in (True, False, ValueError("broken"), True):
        slow.truth = truth
        if isinstance(truth, Exception):
            with pytest.raises(ValueError, match="broken"):
                look(slow)
        else:
            assert look(slow) is truth
