"""Run a server until it is told to end, and let what it has accepted finish."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType

import uvicorn

from hf_cb.server.app import Metrics, create_app
from hf_cb.server.connections import BoundedConnection
from hf_cb.server.gate import Gate
from hf_cb.server.models import ServedModel
from hf_cb.server.settings import ServerSettings

_BACKLOG = 2048  # connections that wait to be taken
_MAX_HEAD = 1 << 16  # bytes


def serve(
    models: Sequence[ServedModel],
    settings: ServerSettings | None = None,
    *,
    metrics: Metrics | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve `models` over HTTP; blocks. The first SIGTERM or SIGINT drains, a second one ends at once; then the models close.

    `on_ready` is given the address, such as http://127.0.0.1:8000, when the socket listens. Raises InvalidArgumentError for an
    address that may not be used (`ServerSettings.check_bind`), and OSError if the system does not give it.
    """
    HttpServer(models, settings or ServerSettings(), metrics, on_ready).serve_until_told()


class HttpServer(uvicorn.Server):
    """A server that listens once it is made. It drains before it ends: `handle_exit` is what a signal does."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        settings: ServerSettings,
        metrics: Metrics | None = None,
        on_ready: Callable[[str], None] | None = None,
    ) -> None:
        """Make the server; raises what `serve` raises."""
        settings.check_bind()
        app = create_app(models, settings, metrics)
        super().__init__(
            uvicorn.Config(
                app,
                backlog=_BACKLOG,
                http=partial(BoundedConnection, head_timeout=settings.read_timeout),  # type: ignore[arg-type]
                h11_max_incomplete_event_size=_MAX_HEAD,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,  # the gate has one, with the requests' ids
                server_header=False,
            )
        )
        self._models, self._settings, self._on_ready = models, settings, on_ready
        self._gate: Gate = app.state.gate
        self._drain_until: float | None = None
        self._socket = _listen(settings)
        shown = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"

    def serve_until_told(self) -> None:
        """Blocks until all is answered and closed."""
        try:
            self.run(sockets=[self._socket])
        finally:
            self._socket.close()
            for model in self._models:
                model.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take connections."""
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready(self.url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain the first time; the second time, end."""
        self.force_exit = self.should_exit = self._gate.is_draining
        self._gate.drain()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is time to end."""
        if self._gate.is_draining and not self.should_exit:
            limit = self._settings.drain_timeout
            if self._drain_until is None and limit is not None:
                self._drain_until = time.monotonic() + limit
            left = None if self._drain_until is None else max(0.0, self._drain_until - time.monotonic())
            self.should_exit = self._gate.underway == 0 or left == 0
            # What is answered may still be on its way to a client that reads slowly, as far as that is ever allowed.
            patience = [limit for limit in (left, self._settings.write_timeout) if limit is not None]
            self.config.timeout_graceful_shutdown = math.ceil(min(patience)) if patience else None
        return await super().on_tick(counter)


def _listen(settings: ServerSettings) -> socket.socket:
    listening = socket.create_server((settings.host, settings.port), family=settings.family, backlog=_BACKLOG)
    if settings.write_timeout is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        # Of each connection: one whose client is gone, or takes nothing, holds its last bytes no longer than this.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(settings.write_timeout * 1000))
    return listening
