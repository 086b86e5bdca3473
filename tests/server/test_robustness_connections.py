"""Clients that are slow, silent or gone: the others don't wait for them, and nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from crowd import held
from live import QUEUE, SEATS, Live
from raw import Connection, Response, connection, exchange, post
from web import GREEDY, wait_until

pytestmark = pytest.mark.timeout(20)

CHAT = "/v1/chat/completions"


def chat(content: str = "Hello", **fields: Any) -> bytes:
    return post(CHAT, {**GREEDY, "messages": [{"role": "user", "content": content}], "max_tokens": 3, **fields})


def others_are_served(live: Live) -> None:
    assert exchange(live.port, chat()).status == 200


HALVES: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda request: b"",
    "half a line": lambda request: request[:10],
    "half the headers": lambda request: request[: request.index(b"\r\n\r\n") - 5],
    "no body": lambda request: request[: request.index(b"\r\n\r\n") + 4],
    "half a body": lambda request: request[:-10],
}
HEADS = list(HALVES)[:3]


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("leave", ["close", "reset"])
def test_half_a_request_holds_nobody_up(live: Live, name: str, leave: str) -> None:
    halves, before = [Connection(live.port) for _ in range(20)], sum(live.engine.stats().finished.values())
    for half in halves:
        half.send(HALVES[name](chat()))
    others_are_served(live)
    for half in halves:
        getattr(half, leave)()
    others_are_served(live)
    assert sum(live.engine.stats().finished.values()) == before + 2  # of the halves none has come so far


@pytest.mark.parametrize(("name", "first"), [*((name, False) for name in HEADS), *((name, True) for name in HEADS[1:])])
def test_a_head_that_does_not_come_in_time_ends_the_connection(impatient: Live, name: str, first: bool) -> None:
    """After a first request, too."""
    with connection(impatient.port) as client:
        if first:
            client.send(chat())
            assert client.response().status == 200
        client.send(HALVES[name](chat()))
        assert client.is_closed_by_server()


def test_a_body_that_does_not_come_in_time_ends_the_connection(impatient: Live) -> None:
    with connection(impatient.port) as client:
        client.send(chat()[:-10])
        assert client.response().status == 408
        assert client.is_closed_by_server()


def test_a_body_byte_by_byte_is_a_body(live: Live) -> None:
    with connection(live.port) as client:
        for byte in chat():
            client.send(bytes([byte]))
        assert client.response().status == 200


def test_requests_in_one_piece_are_answered_in_order(live: Live) -> None:
    """HTTP/1.1 allows to send the next before the answer to the last (pipelining)."""
    texts = [exchange(live.port, chat(f"Number {i}")).json["choices"] for i in range(4)]
    with connection(live.port) as client:
        client.send(b"".join(chat(f"Number {i}") for i in range(4)))
        assert [client.response().json["choices"] for _ in range(4)] == texts


# With the log-probabilities of 20 tokens at each place, an answer is more than the system's buffers hold.
WORDY = {"max_tokens": 100, "ignore_eos": True, "stream": True, "logprobs": True, "top_logprobs": 20, "n": 16}


def test_a_slow_reader_gets_everything_and_holds_nobody_up(live: Live) -> None:
    with connection(live.port, receive_buffer=4096) as slow:
        slow.send(chat(**WORDY))
        response = slow.begin()
        wait_until(lambda: live.engine.stats().running == 0)
        others_are_served(live)
        lines = [line for line in response.read().split(b"\n\n") if line]
    assert lines[-1] == b"data: [DONE]"
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
    for index in range(16):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        tokens = sum(len(choice["logprobs"]["content"]) for choice in choices if choice.get("logprobs"))
        assert tokens == 100
        assert choices[-1]["finish_reason"] == "length"


def test_who_does_not_read_at_all_is_dropped(impatient: Live) -> None:
    text = answer(exchange(impatient.port, chat()))
    with connection(impatient.port, receive_buffer=4096) as deaf:
        deaf.send(chat(**WORDY))
        assert deaf.begin().status == 200
        for _ in range(2):  # while the server waits for it, and after
            assert answer(exchange(impatient.port, chat())) == text
            wait_until(lambda: not impatient.underway)
        assert deaf.is_closed_by_server()


def test_a_thousand_connections_at_once_are_answered(live: Live) -> None:
    text = answer(exchange(live.port, chat()))
    number = live.room(1000)
    responses = asyncio.run(_burst(live.port, number))
    assert [answer(response) for response in responses] == [text] * number


def test_a_thousand_connections_at_once_are_told_to_come_again_where_few_may_wait(crowded: Live) -> None:
    """None of them is answered before the engine has seen all."""
    text = answer(exchange(crowded.port, chat()))
    number, taken = crowded.room(1000), SEATS + QUEUE
    with ThreadPoolExecutor(1) as thread:
        with held(crowded.engine, taken):
            burst = thread.submit(asyncio.run, _burst(crowded.port, number, refused := []))
            wait_until(lambda: len(refused) == number - taken)
        responses = burst.result()
    assert [answer(response) for response in responses if response.status == 200] == [text] * taken
    for response in refused:
        assert response.status == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json["error"]["code"] == "overloaded"


def answer(response: Response) -> str:
    assert response.status == 200, response
    return response.json["choices"][0]["message"]["content"]


async def _burst(port: int, number: int, refused: list[Response] | None = None) -> list[Response]:
    streams = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(number)))

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Response:
        writer.write(chat())
        head = await reader.readuntil(b"\r\n\r\n")
        status, *lines = head.decode().strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers["content-length"]))
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        response = Response(int(status.split()[1]), headers, body)
        if refused is not None and response.status != 200:
            refused.append(response)
        return response

    return await asyncio.gather(*(ask(*pair) for pair in streams))
