"""Reach: how far back the layers of a group look, and so which of a sequence's blocks they can still need."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reach:
    """`window` W: a token sees itself and the W - 1 before it. `chunk` C: only tokens of its own chunk of C. Neither: all."""

    window: int | None = None
    chunk: int | None = None

    @property
    def span(self) -> int | None:
        """The most tokens that one can see; None: no limit."""
        limits = [limit for limit in (self.window, self.chunk) if limit is not None]
        return min(limits, default=None)

    def first(self, position: int) -> int:
        """The first position that a token at `position`, or any after it, can see."""
        by_window = 0 if self.window is None else position - self.window + 1
        by_chunk = 0 if self.chunk is None else position // self.chunk * self.chunk
        return max(0, by_window, by_chunk)


ALL = Reach()
