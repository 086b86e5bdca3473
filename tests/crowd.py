"""Calls that stand before an engine, in order, until all of them are there: the only way to be sure that they meet. And calls
that come at random moments, as users' do."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import hf_cb

T = TypeVar("T")


@contextlib.contextmanager
def held(engine: hf_cb.Engine, count: int) -> Iterator[None]:
    """Inside, start `count` requests without waiting for them: the engine begins when all of them wait in its queue."""
    with engine.pause():
        yield
        _wait(engine, count)


def answers(engine: hf_cb.Engine, calls: Sequence[Callable[[], T]]) -> list[T]:
    """What the calls return, each on a thread of its own. The engine begins when all wait, in the order of `calls`: what it
    does then is the same every time."""
    with ThreadPoolExecutor(len(calls)) as threads:
        with engine.pause():
            futures = []
            for call in calls:
                waiting = engine.stats().waiting
                futures.append(threads.submit(call))
                _wait(engine, waiting + 1)
        return [future.result() for future in futures]


def _wait(engine: hf_cb.Engine, count: int) -> None:
    end = time.monotonic() + 10
    while engine.stats().waiting < count:
        assert time.monotonic() < end, f"{engine.stats().waiting} of {count} requests have come"
        time.sleep(0.0005)


def at_random_moments(calls: Sequence[Callable[[], T]], last_pause: float, num_threads: int = 16) -> list[T]:
    """What the calls return, each made after a pause of up to so many seconds, while others run."""
    pauses = random.Random(0)

    def later(call: Callable[[], T], pause: float) -> T:
        time.sleep(pause)
        return call()

    with ThreadPoolExecutor(num_threads) as threads:
        return list(threads.map(later, calls, [pauses.uniform(0, last_pause) for _ in calls]))
