"""Watchers see every request come and end, in whatever way; one that fails harms nobody."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
from transformers import PreTrainedModel

import hf_cb
from hf_cb.request import FinishReason, Request
from hf_cb.stats import RequestRecord

pytestmark = pytest.mark.timeout(20)


class Notes:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.came: list[tuple[int, str]] = []
        self.ended_: list[tuple[RequestRecord, str, str]] = []

    def submitted(self, request: Request) -> str:
        self.came.append((request.request_id, threading.current_thread().name))
        return f"note {request.request_id}"

    def ended(self, record: RequestRecord, note: str) -> None:
        self.ended_.append((record, note, threading.current_thread().name))


class Broken:
    def submitted(self, request: Request) -> None:
        if request.max_new_tokens == 1:
            raise RuntimeError("at the door")

    def ended(self, record: RequestRecord, note: None) -> None:
        raise RuntimeError("at the end")


@pytest.fixture
def engine(llama: PreTrainedModel) -> Iterator[hf_cb.Engine]:
    with hf_cb.continuous_batching(llama) as engine:
        yield engine


def test_it_sees_requests_come_on_their_threads_and_end_on_the_engines(engine: hf_cb.Engine) -> None:
    notes = Notes()
    engine.watch(notes)
    result = engine.submit([3, 4, 5], max_new_tokens=4, eos_token_id=None).result()
    assert notes.came == [(result.request_id, threading.current_thread().name)]
    ((record, note, thread),) = notes.ended_  # whoever has the result knows that it was told
    assert (note, thread) == (f"note {result.request_id}", "hf_cb-engine")
    assert (record.finish_reason, record.num_output_tokens, record.error) == (FinishReason.LENGTH, 4, None)
    assert record.submitted_at < record.admitted_at < record.first_token_at < record.finished_at == result.finished_at
    assert record.first_token_at == result.first_token_at


def test_it_sees_what_was_never_admitted_and_why(engine: hf_cb.Engine) -> None:
    notes = Notes()
    engine.watch(notes)
    with engine.pause():
        engine.submit([3], max_new_tokens=4).cancel()
        handle = engine.submit([4], max_new_tokens=4)
        engine.shutdown(drain=False)
    with pytest.raises(hf_cb.EngineClosedError):
        handle.result()
    records = {record.request.prompt: record for record, _, _ in notes.ended_}
    assert records[(4,)].finish_reason is FinishReason.FAILED
    assert "shut down" in str(records[(4,)].error)
    assert records.keys() == {(3,), (4,)}
    assert {record.admitted_at for record in records.values()} == {None}


def test_who_stops_watching_sees_the_end_of_what_it_saw_come(engine: hf_cb.Engine) -> None:
    notes = Notes()
    engine.watch(notes)
    with engine.pause():
        first = engine.submit([3, 4], max_new_tokens=2)
        engine.unwatch(notes)
        second = engine.submit([3, 4], max_new_tokens=2)
    first.result(), second.result()
    assert [record.request.request_id for record, _, _ in notes.ended_] == [first.request_id]
    with pytest.raises(hf_cb.InvalidArgumentError, match="watcher: "):
        engine.unwatch(notes)


def test_one_that_fails_harms_nobody(engine: hf_cb.Engine, caplog: pytest.LogCaptureFixture) -> None:
    notes = Notes()
    engine.watch(Broken())
    engine.watch(notes)
    with caplog.at_level(logging.ERROR, "hf_cb"):
        results = [engine.submit([3, 4], max_new_tokens=n, eos_token_id=None).result() for n in (1, 2)]
    assert [len(result.tokens) for result in results] == [1, 2]
    assert [record.num_output_tokens for record, _, _ in notes.ended_] == [1, 2]
    said = [(record.message, record.engine_request_id) for record in caplog.records]
    assert said == [("a watcher failed", result.request_id) for result in results]
