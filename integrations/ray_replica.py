"""A replica: a model with an engine of its own, behind the OpenAI endpoints."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import torch
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from ray import serve

import hf_cb
from demo import packaged_model
from hf_cb.server import ServedModel, ServerSettings, create_app

REPLICA_HEADER = b"x-replica"


class ReplicaSettings(BaseModel):
    """What every replica is made from. `engine`: fields of CBConfig."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="an id or a folder; None: the packaged model")
    name: str | None = Field(None, description="what clients call it; None: the last part of `model`")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    engine: Mapping[str, Any] = {}


class Replica:
    """Loads the model where it runs: on the GPU that Ray gave it, else on the CPU."""

    def __init__(self, settings: ReplicaSettings) -> None:
        model, self._tokenizer = packaged_model.load(settings.model, getattr(torch, settings.dtype))
        self._name = settings.name or (os.path.basename(settings.model.rstrip("/")) if settings.model else packaged_model.NAME)
        self._model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        self.engine = hf_cb.install(self._model, **settings.engine)
        if self.engine.unsupported_reason:
            raise ValueError(f"model: {self._name} cannot be served: {self.engine.unsupported_reason}")

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = create_app([ServedModel(self._name, self._model, self._tokenizer)], ServerSettings())
        app.add_middleware(Signed, name=serve.get_replica_context().replica_id.unique_id)
        return app

    def check_health(self) -> None:
        """What Ray calls every few seconds: after three failures the replica is replaced by a new one."""
        self.engine.check_open()

    def __del__(self) -> None:
        # Ray waits for the requests that run before it comes to this.
        if hasattr(self, "engine"):
            hf_cb.uninstall(self._model)


class Signed:
    """ASGI middleware: every response says which replica it is from."""

    def __init__(self, app: Callable[..., Awaitable[None]], name: str) -> None:
        self._app = app
        self._header = (REPLICA_HEADER, name.encode())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sign(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self._header]}
            await send(message)

        await self._app(scope, receive, sign)
