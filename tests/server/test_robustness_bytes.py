"""Bytes that no good client sends: each is answered with a 4xx in OpenAI's shape, or ends its connection; nothing is left."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from live import MAX_BODY, Live
from raw import Response, connection, exchange, post

pytestmark = pytest.mark.timeout(20)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def hello(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "temperature": 0} | fields


MALFORMED = {
    "nothing": b"",
    "no content": b'{"model": "tiny"}',
    "spaces": b"  \r\n ",
    "half": b'{"model": "tiny", "messages": [',
    "two": b"{} {}",
    "list": b"[]",
    "null": b"null",
    "number": b"3",
    "string": b'"tiny"',
    "single quotes": b"{'model': 'tiny'}",
    "invalid utf-8": b'{"model": "\xff\xfe"}',
    "cut utf-8": b'{"model": "tiny", "prompt": "\xc3"}',
    "zero bytes": b"\0" * 100,
    "deep list": b"[" * 50_000,
    "deep object": b'{"model":' * 10_000 + b"1" + b"}" * 10_000,
    "deep value": b'{"model": "tiny", "messages": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    "long integer": b'{"model": "tiny", "prompt": "x", "max_tokens": ' + b"9" * 10_000 + b"}",
    "infinity": b'{"model": "tiny", "prompt": "x", "temperature": Infinity}',
    "nan": b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
    "overflow": b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
    "lone surrogate": b'{"model": "tiny", "prompt": "\\ud800", "max_tokens": 1, "x": 1}',
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_bodies_are_refused(live: Live, path: str, name: str) -> None:
    assert_refused(exchange(live.port, post(path, MALFORMED[name])), 400)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\0", "\x1b[2J", "\u202e\ufeff\ufffe", "e\u0301" * 50])
def test_odd_characters_are_text_or_refused(live: Live, text: str) -> None:
    """json.dumps writes lone surrogates as escapes, which are valid JSON and no valid text."""
    chat, completion = hello(messages=[{"role": "user", "content": text}]), {"model": "tiny", "prompt": text, "max_tokens": 3}
    for path, body, param in ((CHAT, chat, "messages[0].content"), (COMPLETIONS, completion, "prompt")):
        response = exchange(live.port, post(path, body))
        if any("\ud800" <= c <= "\udfff" for c in text):
            assert assert_refused(response, 400)["param"] == param
        else:
            assert response.status == 200, response


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "a/b;;=", ""])
def test_wrong_content_types(live: Live, kind: str | None) -> None:
    """What is not declared as JSON is not read as JSON: a web page elsewhere could send it without the browser's asking."""
    assert "application/json" in assert_refused(exchange(live.port, post(CHAT, hello(), content_type=kind)), 400)["message"]


def test_a_body_that_says_it_is_too_long_is_refused_before_it_comes(live: Live) -> None:
    with connection(live.port) as client:
        client.send(post(CHAT, b"", content_length=str(1 << 40)))
        assert assert_refused(client.response(), 413)["code"] == "too_large"


def test_a_body_that_becomes_too_long_is_refused(live: Live) -> None:
    piece = b"%x\r\n%b\r\n" % (1 << 16, b" " * (1 << 16))
    with connection(live.port) as client:
        client.send(post(CHAT, b"", content_length=None, transfer_encoding="chunked"))
        try:
            for _ in range(2 + MAX_BODY // (1 << 16)):
                client.send(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it did not have to listen to the end
        assert assert_refused(client.response(), 413)["code"] == "too_large"


NOT_HTTP = {
    "binary": bytes(range(256)),
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500,
    "no version": b"GET /\r\n\r\n",
    "old version": b"POST /v1/chat/completions HTTP/0.9\r\n\r\n",
    "no colon": b"GET / HTTP/1.1\r\nhost\r\n\r\n",
    "long line": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    "long header": b"GET / HTTP/1.1\r\nx: " + b"a" * 200_000 + b"\r\n\r\n",
    "bad length": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}",
    "bad chunk": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.mark.parametrize("name", NOT_HTTP)
def test_what_is_not_http_ends_its_connection_only(live: Live, name: str) -> None:
    with connection(live.port) as client:
        try:
            client.send(NOT_HTTP[name])
            client.socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it may have had enough before the end
        assert client.is_closed_by_server()
    assert exchange(live.port, post(CHAT, hello())).status == 200


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\n"], ids=["path", "value", "headers"])
def test_a_head_without_end_is_not_kept(live: Live, start: bytes) -> None:
    with connection(live.port) as client, pytest.raises(ConnectionError):  # noqa: PT012
        client.send(start)
        for _ in range(2000):  # 128 MiB: more than the buffers between us
            client.send(b"a" * (1 << 16) if not start.endswith(b"\n") else b"x: 1\r\n" * (1 << 13))


HEADERS = {
    "x_request_id": "\x01\x02",
    "authorization": "\xff" * 100,
    "x_request_timeout": "nan",
    "x_priority": "9" * 400,
    "x_tenant": "\xe9" * 2000,
    "accept_encoding": "zzz",
    "expect": "100-continue",
    "content_encoding": "gzip",
}


@pytest.mark.parametrize("name", HEADERS)
def test_odd_headers_are_refused_or_ignored(live: Live, name: str) -> None:
    response = exchange(
        live.port,
        post(CHAT, hello()).replace(b"\r\n", f"\r\n{name.replace('_', '-')}: {HEADERS[name]}\r\n".encode("latin-1"), 1),
    )
    assert response.status in (200, 400, 415), response
    if response.status != 200:
        assert response.status != 400 or not response.body.startswith(b"{") or assert_error(response.json) is None


def assert_refused(response: Response, status: int) -> dict[str, Any]:
    """With this status. Returns the error."""
    assert response.status == status, response
    assert response.headers["x-request-id"]
    assert_error(response.json)
    error: dict[str, Any] = response.json["error"]
    return error


def assert_error(body: object) -> None:
    """OpenAI's shape of errors."""
    assert isinstance(body, dict)
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)
