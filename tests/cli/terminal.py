"""A program at a terminal of its own: what it shows, and the keys that somebody presses."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]
# The terminal becomes the program's controlling one: Ctrl-C reaches it as from a keyboard.
_ATTACH = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
CTRL_C = b"\x03"


def environment() -> dict[str, str]:
    """Of a program that a test starts: this checkout's code, a plain terminal of 100 columns."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100", "LINES": "40", "HF_HUB_OFFLINE": "1"}


class Terminal:
    """`python ARGUMENTS` at a pseudo-terminal, for the length of a with block."""

    def __init__(self, *arguments: str) -> None:
        self._keyboard, inside = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ATTACH, *arguments],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            env=environment(),
        )
        os.close(inside)
        self._unread = ""
        self.shown = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        os.close(self._keyboard)

    def press(self, keys: bytes) -> None:
        """As somebody at the keyboard."""
        os.write(self._keyboard, keys)

    def interrupt_the_prompt(self, pattern: str) -> None:
        """Ctrl-C, as often as it takes: one that comes just before the program waits for keys is seen with the next."""
        for _ in range(5):
            self.press(CTRL_C)
            with contextlib.suppress(AssertionError):
                self.wait_for(pattern, seconds=15)
                return
        self.wait_for(pattern, seconds=0)

    def wait_for(self, pattern: str, seconds: float = 60) -> str:
        """Read on until something is shown that the regular expression matches; returns it with what came before it."""
        end = time.monotonic() + seconds
        while (match := re.search(pattern, self._unread)) is None:
            left = end - time.monotonic()
            assert left > 0, f"{pattern!r} has not come; shown: {self.shown!r}"
            assert self._read(left), f"the program ended before {pattern!r}; shown: {self.shown!r}"
        before, self._unread = self._unread[: match.end()], self._unread[match.end() :]
        return before

    def wait_for_end(self, seconds: float = 60) -> int:
        """The program's exit status."""
        end = time.monotonic() + seconds
        while self._read(end - time.monotonic()):
            assert time.monotonic() < end, f"it has not ended; shown: {self.shown!r}"
        return self._process.wait(max(0.1, end - time.monotonic()))

    def _read(self, seconds: float) -> bool:
        """False: the program has closed its terminal."""
        if not select.select([self._keyboard], [], [], max(0.0, seconds))[0]:
            return True
        try:
            data = os.read(self._keyboard, 1 << 16)
        except OSError:  # Linux' way to say that nobody is there any more
            return False
        text = data.decode("utf-8", "replace")
        self._unread += text
        self.shown += text
        return bool(data)
