"""A client that says exactly what it is told to, byte by byte, and can stop at any of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_PATIENCE = 15.0  # seconds


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """A TCP connection. `receive_buffer`: bytes that the system may keep for us while we don't read."""

    def __init__(self, port: int, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(_PATIENCE)
        self.socket.connect(("127.0.0.1", port))
        self._response: http.client.HTTPResponse | None = None

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def begin(self) -> http.client.HTTPResponse:
        """Read the response's head."""
        self._response = http.client.HTTPResponse(self.socket)
        self._response.begin()
        return self._response

    def response(self) -> Response:
        response = self.begin()
        return Response(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def is_closed_by_server(self) -> bool:
        """Wait for the end, and whatever comes before it."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        if self._response is not None:
            self._response.close()  # it has a handle of its own on the socket
        self.socket.close()

    def reset(self) -> None:
        """Leave without a goodbye: RST instead of FIN."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()


@contextlib.contextmanager
def connection(port: int, receive_buffer: int | None = None) -> Iterator[Connection]:
    made = Connection(port, receive_buffer)
    try:
        yield made
    finally:
        made.close()


def post(path: str, body: bytes | dict[str, Any], **headers: str | None) -> bytes:
    """A request's bytes. `headers`: with _ for -; None leaves out one that would be there."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    all_headers = {"host": "test", "content_type": "application/json", "content_length": str(len(data))} | headers
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in all_headers.items() if value is not None]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode() + data


def exchange(port: int, data: bytes) -> Response:
    """Send it on a connection of its own, and read the answer."""
    with connection(port) as made:
        made.send(data)
        return made.response()
