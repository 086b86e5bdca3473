"""A server that listens, on a thread of this process: what it holds can be looked at."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hf_cb
from hf_cb.server.models import load_model
from hf_cb.server.run import HttpServer
from hf_cb.server.settings import ServerSettings

QUEUE = 16
"""The most requests that wait in a crowded server."""

GRACE = 10.0  # seconds in which what was left must be gone


class Live:
    """The tiny chat model behind the server that `serve` runs."""

    def __init__(self, folder: Path, settings: ServerSettings, **engine: Any) -> None:
        self.settings = settings
        self.served = load_model(str(folder), "tiny", **engine)
        ready = threading.Event()
        self._server = HttpServer([self.served], settings, on_ready=lambda url: ready.set())
        self.url = self._server.url
        self.port = int(self.url.rpartition(":")[2])
        self._thread = threading.Thread(target=self._server.serve_until_told)
        self._thread.start()
        assert ready.wait(GRACE)
        self._before = self._held()

    @property
    def engine(self) -> hf_cb.Engine:
        return self.served.engine

    @property
    def underway(self) -> int:
        """Requests that the application is at."""
        return self._server.config.app.state.gate.underway

    def room(self, number: int) -> int:
        """So many connections, or as many as this process may open: each has two ends here."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return min(number, (hard - len(os.listdir("/proc/self/fd")) - 50) // 2)

    def check_clean(self) -> None:
        """Raise AssertionError unless all is as it was before the first request."""
        wait_until(lambda: self._held() == self._before, f"left: {self._held()}, at first {self._before}")

    def _held(self) -> dict[str, Any]:
        stats = self.engine.stats()
        return {
            "running": stats.running,
            "waiting": stats.waiting,
            "blocks": stats.blocks_used,
            "underway": self.underway,
            "connections": len(self._server.server_state.connections),
            "tasks": len(self._server.server_state.tasks),
            "sockets": sum("socket:" in _target(fd) for fd in os.listdir("/proc/self/fd")),
        }

    def close(self) -> None:
        """SIGTERM, as far as a thread can have it."""
        self._server.handle_exit(signal.SIGTERM, None)
        self._thread.join()


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


@contextlib.contextmanager
def live_server(folder: Path, settings: ServerSettings, **engine: Any) -> Iterator[Live]:
    live = Live(folder, settings, **engine)
    try:
        yield live
    finally:
        live.close()


def wait_until(condition: Callable[[], object], what: str, seconds: float = GRACE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.002)
