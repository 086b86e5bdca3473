"""Connections: uvicorn's, with an end to how much and how long a request's head may be."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class BoundedConnection(H11Protocol):
    """A connection by h11, which takes heads of 64 KiB at most, where httptools takes what comes until the memory is full.

    uvicorn ends connections that are idle after an answer, but waits for ever for a first request, or for the rest of a head.
    """

    def __init__(self, *args: Any, head_timeout: float | None, **kwargs: Any) -> None:
        """`head_timeout`: seconds from the connection, or a head's first byte, to its last. None: no limit."""
        super().__init__(*args, **kwargs)
        self._head_timeout = head_timeout
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take in the bytes that came."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting: the connection is gone."""
        super().connection_lost(exc)
        self._unwatch()

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:  # a whole head is there, or nothing more will be
            self._unwatch()
        elif self._timer is None and self._head_timeout is not None:
            self._timer = self.loop.call_later(self._head_timeout, self.transport.close)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
