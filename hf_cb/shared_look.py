"""SharedLook: one look at something that may change serves all callers who came before it began."""

from __future__ import annotations

import threading
from collections.abc import Callable


class SharedLook:
    """For looks that take milliseconds and that many threads want at once: of fifty, two look and the rest wait."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler, or a finalizer, may call in the middle of a look
        self._begun = 0  # looks
        self._seen: bool | None = None  # by the latest; None: it raised

    def __call__(self, look: Callable[[], bool]) -> bool:
        """What `look`, the same one for all callers, sees between call and return. Raises what one's own look raises."""
        before = self._begun  # a look that is under way may have passed already what has just been changed
        with self._lock:
            if self._begun == before or self._seen is None:
                self._begun += 1
                self._seen = None
                self._seen = look()
            return self._seen
