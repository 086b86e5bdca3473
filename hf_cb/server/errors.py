"""Answers with a status of 400 and more (429, its Retry-After), as OpenAI's clients know them: {"error": {"message", ...}}."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from hf_cb.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidArgumentError,
    RequestCancelledError,
    RequestTimeoutError,
    RequestTooLongError,
)

logger = logging.getLogger("hf_cb.server")

RETRY_AFTER = {"retry-after": "1"}  # seconds


class ErrorDetail(BaseModel):
    """`param`: the field that is at fault, such as messages[0].content."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is none."""

    error: ErrorDetail


@dataclass(eq=False)
class ApiError(Exception):
    """An answer with this status."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The error as the JSON object that clients expect."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The error as a response with its status and headers."""
        return JSONResponse(self.body(), self.status, dict(self.headers))


class ClientGoneError(Exception):
    """Who asked has left, or does not take what it is sent: there is nobody to answer."""


def refused(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A request that can't be served as it is. `message`: what is wrong with `param`, or, without one, with the whole."""
    return ApiError(400, message if param is None else f"{param}: {message}", param=param, code=code)


def too_long(param: str, limit: int, got: str) -> ApiError:
    """A prompt of too many tokens."""
    return refused(param, f"takes at most {limit} tokens; got {got}", "context_length_exceeded")


def unavailable(message: str) -> ApiError:
    """The same request may be served later, or by another server."""
    return ApiError(503, message, "server_error", code="unavailable", headers=RETRY_AFTER)


def api_error(error: BaseException, params: Mapping[str, str] | None = None) -> ApiError:
    """Any error as an answer. `params`: the engine's names of arguments -> the client's fields."""
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, InvalidArgumentError):
        name, colon, rest = message.partition(": ")
        field_ = (params or {}).get(name, name) if colon else None
        code = "context_length_exceeded" if isinstance(error, RequestTooLongError) else None
        return refused(field_, rest if colon else message, code)
    if isinstance(error, EngineOverloadedError):
        return ApiError(429, message, "rate_limit_error", code="overloaded", headers=RETRY_AFTER)
    if isinstance(error, RequestTimeoutError):
        if message.startswith("queue_timeout"):
            return unavailable(message)
        return ApiError(504, message, "timeout_error", code="timeout", headers={"x-should-retry": "false"})
    if isinstance(error, (EngineClosedError, EngineDeadError, RequestCancelledError)):
        return unavailable(message)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the request failed; the server's log says why", "server_error")


def add_handlers(app: FastAPI) -> None:
    """Give all of the application's errors this shape."""

    @app.exception_handler(ApiError)
    async def on_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return _invalid(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        code = "not_found" if error.status_code == 404 else None
        return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", code=code).response()


_NO_FIELD = re.compile(r"str$|constrained-|list\[|function-|nullable|[A-Z]|\[key\]")  # parts of a place that name a type
_OWN = re.compile(r"Value error, (\w+): (.*)", re.DOTALL)


def _invalid(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's errors, but for a union the one of the member that went farthest."""
    of_field = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    worst = max(of_field, key=lambda error: (len(error["loc"]), [part for part in error["loc"] if isinstance(part, int)]))
    place, message = list(worst["loc"]), worst["msg"]
    if worst["type"] == "json_invalid":
        return refused(None, f"the body is not JSON: {worst['ctx']['error']}")
    if place == ["body"] and worst["type"] in ("missing", "model_attributes_type", "dict_type", "model_type"):
        return refused(None, "the body takes a JSON object, with the header content-type: application/json")
    is_unknown = worst["type"] == "extra_forbidden"  # the last part is then the client's own word, whatever it looks like
    named, unknown = (place[1:-1], place[-1:]) if is_unknown else (place[1:], [])
    fields = [part for part in named if isinstance(part, int) or not _NO_FIELD.match(part)] + unknown
    if own := _OWN.fullmatch(message):
        fields, message = [*fields, own[1]], own[2]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fields).lstrip(".")
    if is_unknown:
        return refused(param, "this server has no such field", "unknown_parameter")
    message = message[0].lower() + message[1:]
    return refused(param, message) if param else refused(None, f"the body: {message}")
