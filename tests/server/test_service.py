"""How requests are served: priorities, tenants, an engine that is gone, and models that can't be served as they are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import web

import hf_cb
from hf_cb.request import Request
from hf_cb.server.models import ServedModel
from hf_cb.stats import RequestRecord

pytestmark = pytest.mark.timeout(60)


class Ends:
    """Notes how requests are served, in the order in which they end."""

    def __init__(self) -> None:
        self.services: list[tuple[int, str | None, float | None]] = []

    def submitted(self, request: Request) -> None: ...

    def ended(self, record: RequestRecord, note: Any) -> None:
        service = record.request.service
        self.services.append((service.priority, service.tenant, service.timeout))


def test_priority_and_tenant_by_header(folder: Path) -> None:
    model = web.tiny(folder, policy="priority", max_batch_size=1)
    ends = Ends()
    model.engine.watch(ends)
    calls = [("5", "ann", "30"), ("-2", None, None), ("0", "bob", "900")]
    with web.running(model, api_keys=("one", "two")) as server, ThreadPoolExecutor(3) as threads, server.engine.pause():
        for i, (priority, tenant, timeout) in enumerate(calls):
            headers = {"authorization": "Bearer two", "x-priority": priority}
            headers |= {} if tenant is None else {"x-tenant": tenant}
            headers |= {} if timeout is None else {"x-request-timeout": timeout}
            body = {"messages": web.HELLO, **web.GREEDY, "max_tokens": 4}
            threads.submit(server.post, "/v1/chat/completions", json=body, headers=headers)
            web.wait_until(lambda due=i + 1: server.engine.stats().waiting == due)
    assert ends.services == [(-2, "key 1", 600.0), (0, "bob", 600.0), (5, "ann", 30.0)]


def test_an_engine_that_has_ended(folder: Path) -> None:
    with web.running(web.tiny(folder)) as server:
        assert httpx.get(f"{server.url}/health/live").status_code == 200
        server.engine.shutdown()
        for path in ("/health", "/health/live", "/health/ready"):
            assert httpx.get(f"{server.url}{path}").status_code == 503
        for stream in (True, False):
            body = {"messages": web.HELLO, **web.GREEDY, "stream": stream}
            assert server.post("/v1/chat/completions", json=body).json()["error"]["code"] == "unavailable"


def test_an_error_of_our_own_is_told_without_its_secrets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("secret")

    with web.running(web.tiny(folder)) as server:
        monkeypatch.setattr(server.engine, "submit_batch", fails)
        reply = server.post("/v1/chat/completions", json={"messages": web.HELLO, **web.GREEDY})
        assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
        assert "secret" not in reply.text
        assert reply.headers["x-request-id"]


def test_models_that_cannot_be_served(folder: Path) -> None:
    served = web.tiny(folder)
    try:
        served.model.generation_config.no_repeat_ngram_size = 2
        with pytest.raises(hf_cb.UnsupportedModelError, match="no_repeat_ngram_size"):
            ServedModel("other", served.engine, served.tokenizer, served.model)
        with pytest.raises(hf_cb.InvalidArgumentError, match="name"):
            ServedModel("", served.engine, served.tokenizer, served.model)
    finally:
        served.close()
    assert not served.engine.is_open


def test_the_models_own_generation_config_counts(folder: Path) -> None:
    """Where a client says nothing. Without one, all tokens can be drawn."""
    served = web.tiny(folder)
    served.model.generation_config.update(top_k=1, repetition_penalty=1.7)
    with web.running(served) as server:
        body = {"messages": web.HELLO, "model": web.MODEL, "max_tokens": 12, "seed": 3}
        text = server.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        assert text == server.plain_text(web.HELLO, 12)
        free = server.post("/v1/chat/completions", json={**body, "top_k": -1}).json()["choices"][0]["message"]["content"]
        assert free != text
