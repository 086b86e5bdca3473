"""Watchers: who is told of every request of an engine when it comes and when it has ended, for traces and logs."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, Protocol

from hf_cb.request import Request
from hf_cb.stats import RequestRecord

client_request_id: ContextVar[str | None] = ContextVar("client_request_id", default=None)
"""A request's name outside, such as the HTTP header x-request-id: to be set where the request is submitted."""

logger = logging.getLogger("hf_cb")


class RequestWatcher(Protocol):
    """What `Engine.watch` takes. An exception in either method is logged, and changes nothing for the request."""

    def submitted(self, request: Request) -> Any:
        """On the caller's thread, before the request is queued (it may still be refused). What this returns, `ended` gets."""

    def ended(self, record: RequestRecord, note: Any) -> None:
        """On the engine's thread, before the caller learns of the end: every other request waits for this."""


Watched = tuple[tuple[RequestWatcher, Any], ...]
"""Those that have seen a request come, each with what it noted then."""


def tell_submitted(watchers: Iterable[RequestWatcher], request: Request) -> Watched:
    """Tell all of a request that comes in."""
    watched = []
    for watcher in watchers:
        try:
            watched.append((watcher, watcher.submitted(request)))
        except Exception:
            logger.exception("a watcher failed", extra={"engine_request_id": request.request_id})
    return tuple(watched)


def tell_ended(watched: Watched, record: RequestRecord) -> None:
    """Tell those who have seen it come that it has ended."""
    for watcher, note in watched:
        try:
            watcher.ended(record, note)
        except Exception:
            logger.exception("a watcher failed", extra={"engine_request_id": record.request.request_id})
