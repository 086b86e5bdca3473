"""A server whose leavings are looked for: of the engine, the application, the connections, and the process."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import web

import hf_cb

MAX_BODY = 1 << 20
"""Bytes that a patient server takes."""

SEATS, QUEUE = 16, 16
"""The most requests that run and that wait in a crowded server."""


class Live:
    """The tiny chat model's server."""

    def __init__(self, running: web.Running) -> None:
        self._running = running
        self.port = int(running.url.rpartition(":")[2])

    @property
    def engine(self) -> hf_cb.Engine:
        return self._running.engine

    @property
    def url(self) -> str:
        return self._running.url

    @property
    def underway(self) -> int:
        """Requests that the application is at."""
        return self._running.http._gate.underway

    def room(self, number: int) -> int:
        """So many connections, or as many as this process may open: each has two ends here."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return min(number, (hard - len(os.listdir("/proc/self/fd")) - 50) // 2)

    @contextlib.contextmanager
    def left_clean(self) -> Iterator[Live]:
        """Raise AssertionError unless all is afterwards as it was before."""
        before = self._held()
        yield self
        try:
            web.wait_until(lambda: self._held() == before)
        except AssertionError:
            raise AssertionError(f"left: {self._held()}; at first: {before}") from None

    def _held(self) -> dict[str, int]:
        stats, state = self.engine.stats(), self._running.http.server_state
        return {
            "running": stats.running,
            "waiting": stats.waiting,
            "blocks": stats.blocks_used,
            "underway": self.underway,
            "connections": len(state.connections),
            "tasks": len(state.tasks),
            "sockets": sum(_target(fd).startswith("socket:") for fd in os.listdir("/proc/self/fd")),
        }


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


@contextlib.contextmanager
def live_server(folder: Path, engine: dict[str, Any] | None = None, **settings: Any) -> Iterator[Live]:
    with web.running(web.tiny(folder, **(engine or {})), **settings) as running:
        yield Live(running)
