"""A server in a process of its own, started by the command that people use."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_PATIENCE = 300  # seconds for one that starts, and for one that was told to end
_READY = re.compile(r"serving .* on (http://\S+)")


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """`url`: where it listens, such as http://127.0.0.1:8000. `model`: its model's name."""

    process: subprocess.Popen[str]
    url: str
    model: str

    def tell_to_end(self) -> None:
        """SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def status(self) -> int:
        """Its exit status, once it has ended. Raises subprocess.TimeoutExpired."""
        return self.process.wait(_PATIENCE)


@contextlib.contextmanager
def server(folder: str, name: str, engine: Mapping[str, Any]) -> Iterator[ServerProcess]:
    """A server of the model in `folder`. `engine`: fields of CBConfig. Raises RuntimeError, with what it said, if it ends."""
    options = [part for key, value in engine.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "hf_cb.cli", "serve", f"{name}={folder}", "--port", "0", *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, text=True, cwd=Path(__file__).parents[1])
        try:
            yield ServerProcess(process, _address(process, log), name)
        finally:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[str], log: IO[str]) -> str:
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        has_ended = process.poll() is not None
        log.seek(0)
        said = log.read()
        if found := _READY.search(said):
            return found[1]
        if has_ended:
            raise RuntimeError(f"the server has not started: {said[-2000:]}")
        time.sleep(0.05)
    raise RuntimeError(f"the server has not started in {_PATIENCE} s")
