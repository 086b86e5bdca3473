"""The application: OpenAI's endpoints, health and metrics, for any ASGI server."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import FastAPI, Response

from hf_cb.server.models import ServedModel
from hf_cb.server.settings import ServerSettings

Metrics = Callable[[], tuple[bytes, str]]
"""What /metrics answers: (body, content type). Called on the event loop: it must be quick."""


def create_app(models: Sequence[ServedModel], settings: ServerSettings | None = None, metrics: Metrics | None = None) -> FastAPI:
    """An application that serves `models` by their names, until somebody closes them.

    `app.state.gate` (`gate.Gate`) counts what is underway and turns away what comes after `gate.drain()`.
    """
    app = FastAPI(title="hf_cb")

    @app.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "ok"}

    if metrics is not None:

        @app.get("/metrics")
        async def metrics_() -> Response:
            body, kind = metrics()
            return Response(body, media_type=kind)

    return app
