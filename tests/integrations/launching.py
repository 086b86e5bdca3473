"""`accelerate launch` as people type it, on processes of this machine's CPU."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LAUNCH = (sys.executable, "-m", "accelerate.commands.launch")
_MARK = "HF_CB_TEST_LAUNCH"  # in the environment of all that a launch starts: torchrun gives each worker a session of its own


class Launch:
    """The program on so many processes; stderr goes where stdout goes. Nothing of it is left after the with block."""

    def __init__(self, num_processes: int, *arguments: object) -> None:
        several = ("--multi_gpu", "--num_processes", num_processes, "--main_process_port", 0)
        ways = several if num_processes > 1 else ("--cpu",)
        self._mark = uuid.uuid4().hex
        self.launcher = subprocess.Popen(
            [*_LAUNCH, *map(str, ways), "-m", "integrations.accelerate_generate", *map(str, arguments)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", _MARK: self._mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *error: object) -> None:
        kill(self.living())
        self.launcher.communicate()

    @property
    def has_ended(self) -> bool:
        return self.launcher.poll() is not None

    def wait(self) -> tuple[int, str]:
        """Its exit status and what it printed."""
        printed, _ = self.launcher.communicate(timeout=100)
        return self.launcher.returncode, printed

    def living(self) -> list[int]:
        """The launcher and all that it has started, as far as they live."""
        return [pid for pid, environment in _environments() if environment.get(_MARK) == self._mark]

    def ranks(self) -> dict[int, int]:
        """Rank -> process id, of the living."""
        return {
            int(environment["RANK"]): pid
            for pid, environment in _environments()
            if environment.get(_MARK) == self._mark and "RANK" in environment
        }


def launch(num_processes: int, *arguments: object) -> tuple[int, str]:
    """The exit status of a launch that is left to itself, and what it printed."""
    with Launch(num_processes, *arguments) as running:
        return running.wait()


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


def wait_until(condition, what: str, seconds: float = 60) -> None:
    """Raise AssertionError when it doesn't come true in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)
