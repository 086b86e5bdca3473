"""Logs as JSON, and what they say of requests."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest
from transformers import PreTrainedModel

import hf_cb
from hf_cb.metrics.logs import JsonFormatter, RequestLog, log_as_json
from hf_cb.runtime.model_runner import ModelRunner
from hf_cb.watch import client_request_id

pytestmark = pytest.mark.timeout(20)


def lines_of(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_record_is_a_line_of_json() -> None:
    try:
        raise ValueError("of two\nlines")
    except ValueError as error:
        record = logging.LogRecord("a.b", logging.WARNING, "f.py", 1, "%s and \n %d", ("x", 2), (type(error), error, None))
    record.request_id, record.odd = 7, {1, 2}
    line = JsonFormatter().format(record)
    assert "\n" not in line
    fields = json.loads(line)
    assert fields.pop("time").endswith("+00:00")
    assert fields.pop("exception") == "ValueError: of two\nlines"
    assert fields == {"level": "WARNING", "logger": "a.b", "message": "x and \n 2", "request_id": 7, "odd": "{1, 2}"}


def test_each_request_has_a_line_with_both_of_its_names(llama: PreTrainedModel) -> None:
    stream = io.StringIO()
    stop = log_as_json(stream)
    try:
        with hf_cb.continuous_batching(llama) as engine:
            engine.watch(RequestLog("tiny"))
            token = client_request_id.set("from outside")
            result = engine.submit([3, 4, 5], max_new_tokens=4, eos_token_id=None, tenant="ann").result()
            client_request_id.reset(token)
            with engine.pause():
                engine.submit([3], max_new_tokens=4)
                engine.shutdown(drain=False)
    finally:
        stop()
    answered, failed = lines_of(stream)
    assert {name: answered[name] for name in ("logger", "level", "message", "request_id", "engine_request_id")} == {
        "logger": "hf_cb.requests",
        "level": "INFO",
        "message": "request ended: length",
        "request_id": "from outside",
        "engine_request_id": result.request_id,
    }
    assert (answered["model"], answered["tenant"], answered["num_prompt_tokens"]) == ("tiny", "ann", 3)
    assert (answered["num_output_tokens"], answered["error"]) == (4, None)
    assert answered["seconds"] == pytest.approx(result.finished_at - result.submitted_at, abs=1e-5)
    assert 0 < answered["queue_seconds"] < answered["first_token_seconds"] < answered["seconds"]
    assert (failed["level"], failed["first_token_seconds"]) == ("WARNING", None)
    assert failed["request_id"] == str(failed["engine_request_id"])


def test_a_failing_step_names_its_requests(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("on purpose")

    stream = io.StringIO()
    stop = log_as_json(stream)
    try:
        with hf_cb.continuous_batching(llama) as engine:
            monkeypatch.setattr(ModelRunner, "execute", fail)
            handle = engine.submit([3, 4], max_new_tokens=2)
            with pytest.raises(hf_cb.RequestFailedError):
                handle.result()
    finally:
        stop()
    (line,) = lines_of(stream)
    assert line["engine_request_ids"] == [handle.request_id]
    assert "ArithmeticError: on purpose" in line["exception"]


def test_the_logger_is_afterwards_what_it_was() -> None:
    logger = logging.getLogger("hf_cb")
    before = logger.level, logger.propagate, list(logger.handlers)
    log_as_json(io.StringIO())()
    assert (logger.level, logger.propagate, logger.handlers) == before
