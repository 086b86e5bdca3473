"""Errand: a call of `generate()` that is made on a thread of the package's own, for somebody who waits elsewhere.

What differs from a caller's own thread: nobody interrupts it there, so whoever it is made for can cancel it; and which of
several comes first to torch's generator is chance, so each brings the seed that its place gives it.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import threading
from collections.abc import Iterator, Sequence

from hf_cb.errors import RequestCancelledError
from hf_cb.handle import GenerationHandle
from hf_cb.hf.seeds import draw_seed


class Seeds:
    """A seed for each place of a sequence of calls, all from one draw, which is made when the first of them is wanted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._base: int | None = None

    def at(self, place: int) -> int:
        """The same for a place whoever asks first, and unlike its neighbours', for the rows of a call count on from it."""
        with self._lock:
            if self._base is None:
                self._base = draw_seed()
        digest = hashlib.blake2b(f"{self._base} {place}".encode(), digest_size=7).digest()
        return int.from_bytes(digest, "big")


class Errand:
    """One such call. All methods may be called from any thread; `cancel` by the garbage collector too, so it takes no lock."""

    def __init__(self, seeds: Seeds, place: int) -> None:
        self._seeds = seeds
        self._place = place
        self._handles: Sequence[GenerationHandle] = ()
        self._is_cancelled = False

    def seed(self) -> int:
        """For a call that samples and names no seed."""
        return self._seeds.at(self._place)

    def hold(self, handles: Sequence[GenerationHandle]) -> None:
        """Note what the call waits for, for `cancel`."""
        self._handles = handles
        if self._is_cancelled:
            _cancel(handles)

    def cancel(self) -> None:
        """Let the call end soon, with RequestCancelledError."""
        self._is_cancelled = True
        _cancel(self._handles)

    def check(self) -> None:
        """Raise RequestCancelledError if it was cancelled: before anything that can't be stopped once it runs."""
        if self._is_cancelled:
            raise RequestCancelledError("nobody waits for this call any more")

    @contextlib.contextmanager
    def underway(self) -> Iterator[None]:
        """Inside, calls of `generate()` on this thread are this errand's."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            self._handles = ()


def _cancel(handles: Sequence[GenerationHandle]) -> None:
    for handle in handles:
        handle.cancel()


_current: contextvars.ContextVar[Errand | None] = contextvars.ContextVar("hf_cb_errand", default=None)


def current() -> Errand | None:
    """The errand that this thread is on, or None."""
    return _current.get()
