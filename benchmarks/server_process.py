"""A server in a process of its own, started by the command that people use."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_READY = "http://"
_PATIENCE = 120  # seconds for one that was told to end


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """`url`: where it listens, such as http://127.0.0.1:8000."""

    process: subprocess.Popen[str]
    url: str
    model: str

    def terminate(self) -> int:
        """SIGTERM; its exit status, once it has ended. Raises subprocess.TimeoutExpired."""
        self.tell_to_end()
        return self.process.wait(_PATIENCE)

    def tell_to_end(self) -> None:
        self.process.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def server(folder: str, name: str, engine: Mapping[str, Any]) -> Iterator[ServerProcess]:
    """A server of the model in `folder`. `engine`: fields of CBConfig. Raises RuntimeError, with what it said, if it ends."""
    command = [sys.executable, "-m", "benchmarks.drivers.serve", folder, name, json.dumps(dict(engine))]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=Path(__file__).parents[1])
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            if not line.startswith(_READY):
                log.seek(0)
                raise RuntimeError(f"the server has not started: {line}\n{log.read()[-2000:]}")
            yield ServerProcess(process, line, name)
        finally:
            process.kill()
            process.communicate()
