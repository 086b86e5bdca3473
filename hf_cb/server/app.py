"""The application: OpenAI's endpoints, health and metrics, for any ASGI server."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from typing_extensions import TypedDict

import hf_cb
from hf_cb.errors import InvalidArgumentError
from hf_cb.server.errors import ApiError, ErrorBody, add_handlers, refused, unavailable
from hf_cb.server.gate import Gate
from hf_cb.server.host import Host
from hf_cb.server.models import ServedModel
from hf_cb.server.protocol import ChatBody, CompletionBody
from hf_cb.server.replies import ChatCompletion, ChatReply, Completion, CompletionReply, Reply
from hf_cb.server.sending import StreamedReply, WholeReply
from hf_cb.server.settings import ServerSettings

Metrics = Callable[[], tuple[bytes, str]]
"""What /metrics answers: (body, content type). Called on the event loop: it must be quick."""

_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}
_EVENTS = {"description": "Also as server-sent events, if stream is true", "content": {"text/event-stream": {}}}


class ModelCard(TypedDict):
    """A model, as /v1/models tells of it."""

    id: str
    object: str
    created: int
    owned_by: str


class ModelList(TypedDict):
    """The models that are served."""

    object: str
    data: list[ModelCard]


def create_app(
    models: Sequence[ServedModel], settings: ServerSettings | None = None, metrics: Metrics | None = None
) -> FastAPI:
    """An application that serves `models` by their names, until somebody closes them.

    `app.state.gate` (`gate.Gate`) counts what is underway and turns away what comes after its `drain()`.
    """
    settings = settings or ServerSettings()
    if len({model.name for model in models}) < len(models) or not models:
        raise InvalidArgumentError("models: takes at least one, each under a name of its own")
    hosts = {model.name: Host(model, settings) for model in models}
    gate = Gate(settings)
    app = FastAPI(title="hf_cb", version=hf_cb.__version__, description="Hugging Face models behind OpenAI's API.")
    app.state.gate = gate
    app.add_middleware(gate.wrap)
    add_handlers(app)
    _add_models(app, hosts)
    _add_generation(app, hosts, settings)
    _add_health(app, models, gate)
    if metrics is not None:
        _add_metrics(app, metrics)
    return app


def _add_models(app: FastAPI, hosts: dict[str, Host]) -> None:
    @app.get("/v1/models", responses=_ERRORS)
    async def list_models() -> ModelList:
        return {"object": "list", "data": [_card(host.model) for host in hosts.values()]}

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def show_model(name: str) -> ModelCard:
        return _card(_find(hosts, name).model)


def _card(model: ServedModel) -> ModelCard:
    return {"id": model.name, "object": "model", "created": model.created, "owned_by": "hf_cb"}


def _find(hosts: dict[str, Host], name: str) -> Host:
    if name not in hosts:
        message = f"model: there is no {name!r} here, but {', '.join(hosts)}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return hosts[name]


def _add_generation(app: FastAPI, hosts: dict[str, Host], settings: ServerSettings) -> None:
    def reply(request: Request, body: ChatBody | CompletionBody, kind: type[Reply]) -> Response:
        host, service = _find(hosts, body.model), _service(request, settings)

        async def ask() -> Reply:
            return kind(body, host, await host.ask(body, service), request.state.request_id)

        return StreamedReply(ask) if body.stream else WholeReply(ask)

    @app.post("/v1/chat/completions", responses={**_ERRORS, 200: {**_EVENTS, "model": ChatCompletion}}, response_model=None)
    async def chat(request: Request, body: ChatBody) -> Response:
        """Headers: x-request-id, x-request-timeout (seconds), x-priority (an integer, lower is sooner), x-tenant."""
        return reply(request, body, ChatReply)

    @app.post("/v1/completions", responses={**_ERRORS, 200: {**_EVENTS, "model": Completion}}, response_model=None)
    async def complete(request: Request, body: CompletionBody) -> Response:
        """Continue texts. It takes the headers that chats take."""
        return reply(request, body, CompletionReply)


def _service(request: Request, settings: ServerSettings) -> dict[str, Any]:
    """How a request is to be served, by its headers; tenants are told apart by their keys where they don't say who they are."""
    key_index = request.state.key_index
    tenant = _header(request, "x-tenant", r"[\x21-\x7e]{1,128}", "up to 128 printable characters")
    priority = _header(request, "x-priority", r"-?\d{1,9}", "an integer")
    timeout = _header(request, "x-request-timeout", r"\d{1,9}(\.\d{1,9})?", "seconds")
    seconds = [limit for limit in (timeout and float(timeout), settings.max_timeout) if limit is not None]
    return {
        "tenant": tenant or (None if key_index is None else f"key {key_index}"),
        "priority": int(priority or 0),
        "timeout": min(seconds, default=None),
    }


def _header(request: Request, name: str, pattern: str, takes: str) -> str | None:
    value = request.headers.get(name)
    if value is not None and not re.fullmatch(pattern, value, re.ASCII):
        raise refused(name, f"takes {takes}")
    return value


def _add_health(app: FastAPI, models: Sequence[ServedModel], gate: Gate) -> None:
    @app.get("/health/live", responses=_ERRORS)
    async def live() -> dict[str, str]:
        """Whether the process is worth keeping."""
        for model in models:
            if not model.engine.is_open and not gate.is_draining:
                raise unavailable(f"the engine of {model.name} has ended")
        return {"status": "ok"}

    @app.get("/health/ready", responses=_ERRORS)
    @app.get("/health", responses=_ERRORS)
    async def ready() -> dict[str, str]:
        """Whether requests are taken."""
        if gate.is_draining:
            raise unavailable("the server is shutting down")
        return await live()


def _add_metrics(app: FastAPI, metrics: Metrics) -> None:
    @app.get("/metrics", responses=_ERRORS)
    async def show_metrics() -> Response:
        body, kind = metrics()
        return Response(body, media_type=kind)
