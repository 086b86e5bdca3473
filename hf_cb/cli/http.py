"""Http: a server's address and key, and what is asked of it. The standard library alone."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from hf_cb.errors import InvalidArgumentError

DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Http:
    """`url`: such as http://127.0.0.1:8000. `timeout`: seconds without a byte. Raises InvalidArgumentError for another form.

    All methods raise ConnectionError, in one line that says what to do. Any number of threads may use one.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 600.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # of a port, or an IPv6 address, that is none
            is_address = False
        if not is_address:
            raise InvalidArgumentError(f"URL: takes the address of a server, such as {DEFAULT_URL}; got {self.url!r}")
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InvalidArgumentError("--api-key: takes printable ASCII")

    def get(self, path: str) -> str:
        """Ask for a path, and return the body of the answer."""
        with self._asked("GET", path, None) as response:
            return response.read().decode("utf-8", "replace")

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of an answer by SSE, up to [DONE]."""
        with self._asked("POST", path, json.dumps(body).encode()) as response:
            while line := response.readline():
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    yield json.loads(data)

    @contextlib.contextmanager
    def _asked(self, method: str, path: str, body: bytes | None) -> Iterator[http.client.HTTPResponse]:
        """An answer that can be read. The connection is closed afterwards."""
        parts = urlsplit(self.url)
        cls = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})
        with contextlib.closing(cls(parts.hostname or "", parts.port, timeout=self.timeout)) as connection:
            try:
                connection.request(method, parts.path.rstrip("/") + path, body, headers)
                response = connection.getresponse()
                reason = None if response.status == 200 else _reason(response)
            except (OSError, http.client.HTTPException) as error:
                raise ConnectionError(
                    f"{self.url}: can't be reached ({error or type(error).__name__}); `hf-cb serve MODEL` starts a server"
                ) from error
            if reason is not None:
                hint = "; --api-key or $HF_CB_API_KEY gives a key" if response.status in (401, 403) else ""
                raise ConnectionError(f"{self.url}{path}: {response.status} {reason}{hint}")
            try:
                yield response
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                raise ConnectionError(f"{self.url}: the answer broke off ({error or type(error).__name__})") from error


def _reason(response: http.client.HTTPResponse) -> str:
    """The message of an error in OpenAI's shape, else what HTTP calls it."""
    try:
        return str(json.loads(response.read(1 << 16))["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.reason
