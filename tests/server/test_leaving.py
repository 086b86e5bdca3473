"""Clients that leave, that don't read, and that never send: what ran for them ends, and nobody else notices."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import web

from hf_cb import FinishReason

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def server(folder: Path) -> Iterator[web.Running]:
    with web.running(web.tiny(folder)) as running:
        yield running


@contextlib.contextmanager
def connection(server: web.Running, body: dict[str, Any], length: int | None = None) -> Iterator[socket.socket]:
    """One that has sent a request for a chat."""
    content = json.dumps({"messages": web.HELLO, **body}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        f"content-length: {length or len(content)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as sent:
        sent.sendall(head.encode() + content)
        yield sent


def cancelled(server: web.Running) -> int:
    return server.engine.stats().finished.get(FinishReason.CANCELLED, 0)


def assert_all_is_free(server: web.Running) -> None:
    web.wait_until(lambda: server.http._gate.underway == 0)
    web.wait_until(lambda: server.engine.stats().blocks_used == 0)
    assert server.engine.stats().waiting == server.engine.stats().running == 0


@pytest.mark.parametrize("own", [{"stream": True}, {"stream": False}, {"n": 3, "stream": True}, {"n": 3}])
def test_while_it_runs(server: web.Running, own: dict[str, Any]) -> None:
    with connection(server, {**web.ENDLESS, **own}) as client:
        web.wait_until(lambda: server.engine.stats().output_tokens > 5)
        if own.get("stream"):
            assert b"200 OK" in client.recv(100)
    web.wait_until(lambda: cancelled(server) == own.get("n", 1))
    assert_all_is_free(server)


@pytest.mark.parametrize("stream", [True, False])
def test_while_it_waits(server: web.Running, stream: bool) -> None:
    with server.engine.pause():
        with connection(server, {**web.ENDLESS, "stream": stream}):
            web.wait_until(lambda: server.engine.stats().waiting == 1)
        web.wait_until(lambda: server.engine.stats().waiting == 0)
    assert_all_is_free(server)
    assert server.engine.stats().output_tokens == 0


def test_while_its_text_is_taken_in(server: web.Running, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, has_begun, goes_on = server.engine, threading.Event(), threading.Event()
    submit_batch = engine.submit_batch

    def slowly(*args: Any, **options: Any) -> Any:
        has_begun.set()
        assert goes_on.wait(20)
        return submit_batch(*args, **options)

    monkeypatch.setattr(engine, "submit_batch", slowly)
    with connection(server, web.ENDLESS):
        assert has_begun.wait(20)
    web.wait_until(lambda: server.http._gate.underway == 0)
    goes_on.set()
    web.wait_until(lambda: cancelled(server) == 1)
    assert_all_is_free(server)


def test_before_its_body_has_come(server: web.Running) -> None:
    with connection(server, web.ENDLESS, length=100_000):
        web.wait_until(lambda: server.http._gate.underway == 1)
    assert_all_is_free(server)
    assert server.engine.stats().prompt_tokens == 0


def test_a_body_that_does_not_come(folder: Path) -> None:
    with web.running(web.tiny(folder), read_timeout=0.2) as server, connection(server, web.ENDLESS, length=100_000) as client:
        client.settimeout(20)
        assert b"408" in client.recv(1000).splitlines()[0]
        while client.recv(1000):
            pass  # until the server has closed it
        assert_all_is_free(server)


def test_one_that_does_not_read_is_dropped_and_the_others_are_served(folder: Path) -> None:
    """Its answer is more than the buffers between the two hold, so that the server has to wait for it."""
    with web.running(web.tiny(folder), write_timeout=0.5) as server:
        server.http._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of those that are accepted from now on
        with connection(server, {**web.ENDLESS, "stream": True, "logprobs": True, "top_logprobs": 20}) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            web.wait_until(lambda: server.engine.stats().output_tokens > 5)
            text = server.post("/v1/chat/completions", json={"messages": web.HELLO, **web.GREEDY}).json()
            assert text["choices"][0]["message"]["content"] == server.plain_text(web.HELLO, 24)
            web.wait_until(lambda: not server.http.server_state.connections, 30)  # what it has not taken is not kept either
        assert_all_is_free(server)


def test_a_stream_that_fails_says_so(server: web.Running) -> None:
    """In its midst, where there is no status any more."""
    body = {"messages": web.HELLO, **web.ENDLESS, "stream": True}
    url, headers = f"{server.url}/v1/chat/completions", {"x-request-timeout": "3"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=20) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["choices"]
        with server.engine.pause():
            rest = [line for line in lines if line]
    assert response.status_code == 200
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "timeout"
    assert server.engine.stats().finished == {FinishReason.TIMEOUT: 1}
