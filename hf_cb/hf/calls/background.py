"""BackgroundCall: a call of `generate()` that is made on a thread of the package's own, for somebody who waits elsewhere.

What differs from a caller's own thread: nobody interrupts it there, so whoever it is made for can cancel it; and which of
several comes first to torch's generator is chance, so each brings the seed that its place gives it.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
from collections.abc import Iterator, Sequence

from hf_cb.errors import RequestCancelledError
from hf_cb.handle import GenerationHandle


def seed_at(base: int, place: int) -> int:
    """A seed for one of a sequence of calls. Unlike its neighbours', for the rows of a call count on from it."""
    digest = hashlib.blake2b(f"{base} {place}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


class BackgroundCall:
    """One such call. All methods may be called from any thread; `cancel` by the garbage collector too, so it takes no lock."""

    def __init__(self, seed: int) -> None:
        """`seed`: for a call that samples and names none."""
        self.seed = seed
        self._handles: Sequence[GenerationHandle] = ()
        self._is_cancelled = False

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
        """Inside, calls of `generate()` on this thread are this background call's."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            self._handles = ()


def _cancel(handles: Sequence[GenerationHandle]) -> None:
    for handle in handles:
        handle.cancel()


_current: contextvars.ContextVar[BackgroundCall | None] = contextvars.ContextVar("hf_cb_background_call", default=None)


def current() -> BackgroundCall | None:
    """The background call that this thread is on, or None."""
    return _current.get()
