"""Logs as JSON, one object a line, with the ids of the requests that they are about. The standard library alone."""

from __future__ import annotations

import json
import logging
import logging.handlers
import queue
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, TextIO

from hf_cb.request import FinishReason, Request
from hf_cb.stats import RequestRecord
from hf_cb.watch import client_request_id

_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """A log record as one line of JSON: time (UTC), level, logger, message, the `extra` fields, and the traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Values that JSON has no form for are written as their `str`."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class RequestLog:
    """A watcher (`engine.watch(RequestLog("my-model"))`) that logs each request as it ends, with its figures as fields.

    INFO for an answer or what its caller has cancelled, WARNING for the rest; to the logger `hf_cb.requests`.
    """

    def __init__(self, model: str, logger: logging.Logger | None = None) -> None:
        self._model = model
        self._logger = logger or logging.getLogger("hf_cb.requests")

    def submitted(self, request: Request) -> str | None:
        """Note the request's name outside."""
        return client_request_id.get()

    def ended(self, record: RequestRecord, note: str | None) -> None:
        """Log a request that has ended."""
        is_fine = record.is_answered or record.finish_reason is FinishReason.CANCELLED
        level = logging.INFO if is_fine else logging.WARNING
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "request ended: %s", record.finish_reason.value, extra=self._fields(record, note))

    def _fields(self, record: RequestRecord, name: str | None) -> dict[str, Any]:
        def since(moment: float | None) -> float | None:
            return None if moment is None else round(moment - record.submitted_at, 6)

        return {
            "request_id": name or str(record.request.request_id),
            "engine_request_id": record.request.request_id,
            "model": self._model,
            "tenant": record.request.service.tenant,
            "finish_reason": record.finish_reason.value,
            "error": record.error,
            "num_prompt_tokens": len(record.request.prompt),
            "num_cached_tokens": record.num_cached_tokens,
            "num_output_tokens": record.num_output_tokens,
            "queue_seconds": since(record.admitted_at),
            "first_token_seconds": since(record.first_token_at),
            "seconds": since(record.finished_at),
        }


class _Handoff(logging.handlers.QueueHandler):
    """Hands records over as they are: they stay in this process."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record


def log_as_json(stream: TextIO | None = None, level: int = logging.INFO, logger: str = "hf_cb") -> Callable[[], None]:
    """Write what `logger` and those below it say to `stream` (by default stderr). Returns what ends it, with all written.

    The lines are made and written by a thread of their own: a terminal or pipe that nobody reads must not hold up an engine.
    """
    lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
    source = logging.getLogger(logger)
    output = logging.StreamHandler(stream or sys.stderr)
    output.setFormatter(JsonFormatter())
    writer = logging.handlers.QueueListener(lines, output)
    handler = _Handoff(lines)
    before = source.level, source.propagate
    source.addHandler(handler)
    source.setLevel(level)
    source.propagate = False
    writer.start()

    def stop() -> None:
        source.removeHandler(handler)
        source.setLevel(before[0])
        source.propagate = before[1]
        writer.stop()

    return stop
