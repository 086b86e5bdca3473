"""Calls that stand before an engine, in order, until all of them are there: the only way to be sure that they meet."""

from __future__ import annotations

import contextlib
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
