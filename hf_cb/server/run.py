"""Run a server until it is told to end, and let what it has accepted finish."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import uvicorn

from hf_cb.server.app import Metrics, create_app
from hf_cb.server.models import ServedModel
from hf_cb.server.settings import ServerSettings


def serve(
    models: Sequence[ServedModel],
    settings: ServerSettings | None = None,
    *,
    metrics: Metrics | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve `models` over HTTP; blocks. The first SIGTERM or SIGINT drains, a second one ends at once; then the models are closed.

    `on_ready` is given the address, such as http://127.0.0.1:8000, when the socket listens. Raises InvalidArgumentError for an
    address that may not be used (`ServerSettings.check_bind`), and OSError if the system does not give it.
    """
    settings = settings or ServerSettings()
    settings.check_bind()
    uvicorn.run(create_app(models, settings, metrics), host=settings.host, port=settings.port)
