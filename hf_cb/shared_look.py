"""SharedLook: one look at something that may change serves all callers who came before it began."""

from __future__ import annotations

import threading
from collections.abc import Callable


class SharedLook:
    """For looks that take milliseconds and that many threads want at once: of fifty, two look and the rest wait."""

    def __init__(self, look: Callable[[], bool]) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._begun = 0  # looks
        self._seen: bool | None = None  # by the latest; None: it raised

    def __call__(self) -> bool:
        """What is to be seen, at a moment between call and return. Raises what the own look raises."""
        before = self._begun  # a look that is under way may have passed already what has just been changed
        with self._lock:
            if self._begun == before or self._seen is None:
                self._begun += 1
                self._seen = None
                self._seen = self._look()
            return self._seen
