"""What the rows of one call have in common under plain generate: the moment at which it stops, for all of them at once.

On the engine each row, or search, has its own pace. Most calls don't show the difference. Where they do (scores of every step,
criteria without an end-of-sequence token, the running beams in the cache), the parts of a call go on until the last of them has
ended, and what is beyond that is cut off. Used on the engine's thread; read by the caller's once the requests have ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import torch

Step = TypeVar("Step")


class Company:
    """Rows that go on until the last has ended."""

    def __init__(self, num_rows: int, pad_token: int | None) -> None:
        """`pad_token`: what comes after a row's end; None: whatever the model says."""
        self.pad_token = pad_token
        self.num_steps = 0  # of the row that ended last so far
        self._running = num_rows

    def end(self, num_steps: int) -> None:
        """A row has ended with this step, the first being 1."""
        self._running -= 1
        self.num_steps = max(self.num_steps, num_steps)

    def abandon(self) -> None:
        """A row has failed, and the call with it: nobody has to wait for it."""
        self._running = 0

    @property
    def is_over(self) -> bool:
        """Whether all rows have ended: after `num_steps` steps."""
        return self._running == 0


class Steps(Generic[Step]):
    """What each of several searches was like after each of its steps, until a step with which all of them end."""

    def __init__(self, num_searches: int) -> None:
        self.end: int | None = None  # the step, the first being 1
        self._of: list[list[Step]] = [[] for _ in range(num_searches)]

    def add(self, search: int, step: Step) -> list[Step] | None:
        """Note a search's next step. The same step of all searches, if this was the last one missing."""
        own = self._of[search]
        own.append(step)
        if self.end is not None or any(len(other) < len(own) for other in self._of):
            return None
        return [other[len(own) - 1] for other in self._of]

    def last(self, search: int) -> Step:
        """What a search was like when all ended."""
        assert self.end is not None
        return self._of[search][self.end - 1]


def joined(rows: Iterable[tuple[torch.Tensor, ...] | None], num_steps: int) -> Any:
    """Per step [B, vocab], from per row, or search, and step; None: they kept nothing."""
    kept = [row[:num_steps] for row in rows if row is not None]
    return tuple(torch.cat(step) for step in zip(*kept, strict=True)) if kept else None
