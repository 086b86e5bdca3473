"""The gate: ids, keys, bodies and draining, before the application sees a request."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hf_cb.server.errors import ApiError, ClientGoneError, api_error, unavailable
from hf_cb.server.settings import ServerSettings
from hf_cb.server.waiting import in_time
from hf_cb.watch import client_request_id

logger = logging.getLogger("hf_cb.server")

_NO_STATUS = 499  # nginx's, for a client that left before there was an answer
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Gate:
    """Gives each request an id, asks for its key, takes in its body, and counts it until it is answered.

    After `drain()` it turns away what comes, while what is underway goes on. Health is told at any time and without a key. The
    scope's state has `request_id` and `key_index`, the number of the API key (None where there are none).
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.is_draining = False
        self.underway = 0  # requests
        self._settings = settings

    def drain(self) -> None:
        """Refuse requests from now on."""
        self.is_draining = True

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """The application behind the gate."""

        async def gated(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                await self._request(app, scope, receive, send)
            else:
                await app(scope, receive, send)

        return gated

    async def _request(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        headers, began = Headers(scope=scope), time.perf_counter()
        given = headers.get("x-request-id", "")
        own_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = own_id
        client_request_id.set(own_id)
        status = _NO_STATUS

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = own_id
            try:
                await in_time(send(message), self._settings.write_timeout)
            except TimeoutError:
                raise ClientGoneError from None

        is_health = scope["path"].startswith("/health")
        self.underway += not is_health
        try:
            if not is_health:
                scope["state"]["key_index"] = self._admit(headers)
                receive = await self._body(headers, receive)
            await app(scope, receive, answer)
        except ClientGoneError:  # there is nobody to answer, or nobody who reads
            pass
        except Exception as error:
            if status != _NO_STATUS:
                raise
            await api_error(error).response()(scope, receive, answer)
        finally:
            self.underway -= not is_health
            _log(scope, status, time.perf_counter() - began)

    def _admit(self, headers: Headers) -> int | None:
        """Which key opens. Raises ApiError."""
        if self.is_draining:
            raise unavailable("the server is shutting down")
        if not self._settings.api_keys:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        index = self._settings.key_index(key.strip()) if scheme.lower() == "bearer" else None
        if index is None:
            message = "a valid API key is needed, in the header authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return index

    async def _body(self, headers: Headers, receive: Receive) -> Receive:
        """Take in the body, and hand it on in one piece. Raises ApiError."""
        try:
            body = await in_time(self._read(headers, receive), self._settings.read_timeout)
        except TimeoutError:
            raise ApiError(408, "the body did not come in time", headers={"connection": "close"}) from None
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        return replay

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        limit, body = self._settings.max_body_bytes, bytearray()
        told = headers.get("content-length", "")
        is_too_long = told.isdecimal() and int(told[:20]) > limit
        while not is_too_long:
            message: Any = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            body += message.get("body", b"")
            is_too_long = len(body) > limit
            if not message.get("more_body"):
                break
        if is_too_long:
            raise ApiError(413, f"the body takes at most {limit} bytes", code="too_large", headers={"connection": "close"})
        return bytes(body)


def _log(scope: Scope, status: int, seconds: float) -> None:
    path = quote(scope["path"])  # it is decoded, and a line break in it would begin a line of its own
    told = {"request_id": scope["state"]["request_id"], "method": scope["method"], "path": path, "status": status}
    level = logging.DEBUG if scope["path"].startswith(("/health", "/metrics")) else logging.INFO
    text = "%(method)s %(path)s %(status)d in %(seconds).3f s [%(request_id)s]"
    logger.log(level, text, {**told, "seconds": seconds}, extra={**told, "seconds": seconds})
