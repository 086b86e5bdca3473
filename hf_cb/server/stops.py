"""Stop strings: an answer ends before the first of them."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one request, none of them empty."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)

    def __bool__(self) -> bool:
        return bool(self._strings)

    def find(self, text: str, start: int = 0) -> int | None:
        """Where the first one begins, at `start` or after it."""
        found = [place for string in self._strings if (place := text.find(string, start)) >= 0]
        return min(found, default=None)

    def held(self, text: str) -> int:
        """How many characters at the end of `text` may yet turn out to be the beginning of one."""
        return max((_overlap(text, string) for string in self._strings), default=0)


def _overlap(text: str, string: str) -> int:
    """The length of the longest end of `text` that `string` begins with, and goes on from."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
