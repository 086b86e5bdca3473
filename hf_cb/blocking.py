"""How callers' threads block: never for long at a time.

An exception that another thread throws into this one (`PyThreadState_SetAsyncExc`, as func_timeout and stopit do) is raised
between two instructions of Python; a thread that waits in C for a lock comes to none. So every wait for what may take long is
cut into slices, after each of which a few instructions run: some ten microseconds twice a second.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

SLICE = 0.5  # seconds


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
def holding(lock: threading.RLock) -> Iterator[None]:
    """`with lock`, for one that others may hold for long.

    What is thrown while `acquire` waits is raised as it returns, even if it has got the lock: nobody would give that back. Only
    `with lock` has no such moment.
    """
    is_new = not _is_owned(lock)
    try:
        if is_new:
            block(lambda seconds: lock.acquire(timeout=seconds))
        with lock:
            if is_new:
                lock.release()
            yield
    finally:
        if is_new and _is_owned(lock):
            lock.release()


def _is_owned(lock: threading.RLock) -> bool:
    return lock._is_owned()  # type: ignore[attr-defined, no-any-return]  # as threading.Condition asks
