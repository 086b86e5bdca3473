"""Calls that stand before an engine until all of them are there: the only way to be sure that they meet."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import hf_cb


@contextlib.contextmanager
def held(engine: hf_cb.Engine, count: int) -> Iterator[None]:
    """Inside, start `count` calls without waiting for them: the engine begins when all of them wait in its queue."""
    with engine.pause():
        yield
        end = time.monotonic() + 10
        while engine.stats().waiting < count:
            assert time.monotonic() < end, f"{engine.stats().waiting} of {count} calls have come"
            time.sleep(0.001)
