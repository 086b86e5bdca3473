"""Programs as people start them, with all that they start, and an end to it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from typing_extensions import Self

ROOT = Path(__file__).parents[2]
_MARK = "HF_CB_TEST_PROGRAM"  # in the environment of all that a program starts, which may have sessions of their own


class Program:
    """A command from the project's folder; stderr goes where stdout goes. Nothing of it is left after the with block."""

    def __init__(self, *command: object, **environment: str) -> None:
        self._mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            list(map(str, command)),
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", _MARK: self._mark} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        kill(self.living())
        self.process.communicate()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self) -> tuple[int, str]:
        """Its exit status and what it printed."""
        printed, _ = self.process.communicate(timeout=100)
        return self.process.returncode, printed

    def living(self) -> list[int]:
        """It and all that it has started, as far as they live."""
        found = set(self.environments())
        for pid in list(found):  # some write over their environment to change their name in ps
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
        return list(found)

    def environments(self) -> dict[int, Mapping[str, str]]:
        """Those of the living, by process id."""
        return {pid: environment for pid, environment in _environments() if environment.get(_MARK) == self._mark}


def _environments() -> Iterator[tuple[int, dict[str, str]]]:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (data := (entry / "environ").read_text()):  # a zombie has none
                yield int(entry.name), dict(item.split("=", 1) for item in data.split("\0") if "=" in item)


def kill(pids: Sequence[int]) -> None:
    """SIGKILL."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Raise AssertionError when it doesn't come true in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)
