"""A replica: a model with an engine of its own, behind the OpenAI endpoints."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

import hf_cb
from demo import packaged_model
from hf_cb.server.app import create_app
from hf_cb.server.models import ServedModel, load_model
from hf_cb.server.settings import ServerSettings, keys_of

HEADER = "x-replica"


def keys_of_environment() -> tuple[str, ...]:
    """Those of `hf-cb serve`: $HF_CB_API_KEYS, separated by commas."""
    return keys_of(os.environ.get("HF_CB_API_KEYS", ""))


class ReplicaSettings(BaseModel):
    """What every replica is made from."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str | None = None  # an id or a folder; None: the packaged model
    name: str | None = None  # what clients call it; None: the last part of `model`
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    engine: Mapping[str, Any] = {}  # fields of CBConfig
    api_keys: tuple[str, ...] = Field(default_factory=keys_of_environment)  # none: open to everybody

    def load(self) -> ServedModel:
        """The model with hf_cb on it: on the GPU that this process was given, else on the CPU."""
        return load_model(self.model or str(packaged_model.prepare()), self.name, dtype=self.dtype, **self.engine)


class Replica:
    """What runs in a replica's process."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self.served = settings.load()

    def __serve_build_asgi_app__(self) -> FastAPI:
        from ray import serve

        # Who may reach the address is the business of Ray's proxies, which are those that listen.
        settings = ServerSettings(api_keys=self._settings.api_keys, allow_without_keys=True)
        app = create_app([self.served], settings)
        app.add_middleware(Signed, name=serve.get_replica_context().replica_id.unique_id)
        return app

    def check_health(self) -> None:
        """Ray asks every few seconds. After three failures in a row it puts a new replica in the place of this one."""
        if not self.served.engine.is_open:
            raise hf_cb.EngineDeadError(f"{self.served.name}: its engine takes no more requests")

    def __del__(self) -> None:
        # Ray lets the requests that run end before it comes to this.
        if hasattr(self, "served"):
            self.served.close()


class Signed:
    """ASGI middleware: every response says which replica it is from."""

    def __init__(self, app: Callable[..., Awaitable[None]], name: str) -> None:
        self._app = app
        self._header = (HEADER.encode(), name.encode())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sign(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self._header]}
            await send(message)

        await self._app(scope, receive, sign)
