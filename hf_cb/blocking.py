"""How callers' threads block: never for long at a time.

An exception that another thread throws into this one (`PyThreadState_SetAsyncExc`, as func_timeout and stopit do) is raised
between two instructions of Python; a thread that waits in C for a lock comes to none. So every wait for what may take long is
cut into slices, after each of which a few instructions run: some ten microseconds twice a second.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol

SLICE = 0.5  # seconds


class Lock(Protocol):
    """Lock and RLock."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, or wait for it in vain."""
        ...

    def release(self) -> None:
        """Give it back."""


def block(wait: Callable[[float], object], timeout: float | None = None) -> bool:
    """Call `wait(seconds)`, again and again, until it says that what it waits for has come. False: the timeout ran out."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = SLICE if end is None else end - time.monotonic()
        if wait(min(SLICE, max(0.0, left))):
            return True
        if left <= SLICE and end is not None:
            return False


@contextlib.contextmanager
def holding(lock: Lock) -> Iterator[None]:
    """`with lock`, for one that others may hold for long."""
    block(lambda seconds: lock.acquire(timeout=seconds))
    try:
        yield
    finally:
        lock.release()
