"""Clients that leave while something runs for them: it ends, and nothing of it is left."""

from __future__ import annotations

import json
import threading
from collections import Counter
from typing import Any

import httpx
import pytest
from live import Live
from raw import Connection, connection, post
from web import ENDLESS, HELLO, wait_until

from hf_cb import FinishReason

pytestmark = pytest.mark.timeout(60)

CHAT = "/v1/chat/completions"


def endless(**own: Any) -> bytes:
    return post(CHAT, {"messages": HELLO, **ENDLESS, **own})


class Ends:
    """How many requests have ended since, and how."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._before = Counter(live.engine.stats().finished)

    def wait_for(self, **counts: int) -> None:
        """Until these have, and no others."""
        wanted = {FinishReason(reason): count for reason, count in counts.items()}
        wait_until(lambda: Counter(self._live.engine.stats().finished) - self._before == wanted)


@pytest.mark.parametrize("own", [{"stream": True}, {"stream": False}, {"n": 3, "stream": True}, {"n": 3}])
@pytest.mark.parametrize("leave", ["close", "reset"])
def test_while_it_runs(live: Live, own: dict[str, Any], leave: str) -> None:
    """Long before the engine would have come to the end."""
    clients, ends, number = [Connection(live.port) for _ in range(8)], Ends(live), 8 * own.get("n", 1)
    for client in clients:
        client.send(endless(**own))
    wait_until(lambda: live.engine.stats().running == number)
    for client in clients:
        if own.get("stream"):
            response = client.begin()
            assert response.status == 200
            assert response.readline().startswith(b"data: ")
        getattr(client, leave)()
    ends.wait_for(cancelled=number)


@pytest.mark.parametrize("stream", [True, False])
def test_while_it_waits(live: Live, stream: bool) -> None:
    before = live.engine.stats().output_tokens
    with live.engine.pause():
        with connection(live.port) as client:
            client.send(endless(stream=stream))
            wait_until(lambda: live.engine.stats().waiting == 1)
        wait_until(lambda: live.engine.stats().waiting == 0)
    assert live.engine.stats().output_tokens == before


def test_while_its_text_is_taken_in(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, goes_on, ends = threading.Event(), threading.Event(), Ends(live)
    submit_batch = live.engine.submit_batch

    def slowly(*args: Any, **options: Any) -> Any:
        has_begun.set()
        assert goes_on.wait(20)
        return submit_batch(*args, **options)

    monkeypatch.setattr(live.engine, "submit_batch", slowly)
    with connection(live.port) as client:
        client.send(endless())
        assert has_begun.wait(20)
    wait_until(lambda: live.underway == 0)
    goes_on.set()
    ends.wait_for(cancelled=1)


def test_a_stream_that_fails_says_so(live: Live) -> None:
    """In its midst, where there is no status any more."""
    body, ends = {"messages": HELLO, **ENDLESS, "stream": True}, Ends(live)
    with httpx.stream("POST", f"{live.url}{CHAT}", json=body, headers={"x-request-timeout": "3"}, timeout=20) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["choices"]
        with live.engine.pause():
            rest = [line for line in lines if line]
    assert response.status_code == 200
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "timeout"
    ends.wait_for(timeout=1)
