"""Limits in number and time: who is turned away learns at once how long the queue is, and who waits or runs too long ends.

How long a caller waits is another matter.
"""

from __future__ import annotations

import time

import inside
import pytest
from serving import SMALL, Gate, assert_ends, rows, submit, submit_long, together, wait_until
from transformers import PreTrainedModel

import hf_cb
from hf_cb import Engine, EngineOverloadedError, FinishReason, RequestTimeoutError

pytestmark = pytest.mark.timeout(20)

SHORT = 0.05  # seconds
LATE = 5.0  # seconds: what no timeout may be late by, on a machine with other things to do


def test_a_full_queue(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama, max_batch_size=2, max_queue_size=3, **SMALL) as engine, Gate(engine) as gate:
        running = [submit(engine, row) for row in rows()[6:8]]
        gate.arrival()
        waiting = [submit(engine, row) for row in rows()[8:11]]
        for refused in (
            lambda: submit(engine, rows()[0]),
            lambda: engine.generate_batch([rows()[0].prompt], max_new_tokens=2),
            lambda: llama.generate(rows()[0].ids, max_new_tokens=2),
        ):
            with pytest.raises(
                EngineOverloadedError, match=r"^max_queue_size: takes at most 3 .*; [34] wait and [12] run, and 1 "
            ):
                refused()
        waiting[0].cancel()
        gate.let(float("inf"))
        assert [handle.result().tokens for handle in (*running, *waiting[1:])] == [
            row.tokens for row in (*rows()[6:8], *rows()[9:11])
        ]
        assert submit(engine, rows()[0]).result().tokens == rows()[0].tokens
        assert engine.stats().native_calls == {}


def test_all_rows_of_a_call_or_none(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama, max_batch_size=2, max_queue_size=3, **SMALL) as engine:
        with pytest.raises(EngineOverloadedError, match="6 more"):
            engine.generate_batch([rows()[0].prompt] * 6, max_new_tokens=3)
        assert engine.stats().finished == {}
        results = engine.generate_batch([rows()[0].prompt] * 5, max_new_tokens=3)  # two can run at once
        assert [result.tokens for result in results] == [rows()[0].tokens[:3]] * 5


def test_no_queue_at_all(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama, max_batch_size=2, max_queue_size=0, **SMALL) as engine, Gate(engine) as gate:
        handles = [submit(engine, row) for row in rows()[6:8]]
        with pytest.raises(EngineOverloadedError):
            submit(engine, rows()[0])
        gate.let(float("inf"))
        assert [handle.result().tokens for handle in handles] == [row.tokens for row in rows()[6:8]]


def test_who_was_not_admitted_in_time_leaves(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama, max_batch_size=1, queue_timeout=0.1, **SMALL) as engine:
        running = submit_long(engine)
        next(iter(running))
        waiting = submit(engine, rows()[6])
        began = time.monotonic()
        with pytest.raises(RequestTimeoutError, match=r"^queue_timeout: .* within 0.1 s; \d wait and 1 run"):
            waiting.result()
        assert time.monotonic() - began < 5
        assert not running.done  # it was admitted
        running.cancel()
        assert submit(engine, rows()[6]).result().tokens == rows()[6].tokens
        wait_until(lambda: engine.stats().running == 0)
        assert engine.stats().finished == {FinishReason.TIMEOUT: 1, FinishReason.CANCELLED: 1, FinishReason.LENGTH: 1}


def test_who_was_not_admitted_in_time_leaves_a_pause_too(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama, queue_timeout=0.05, **SMALL) as engine:
        with engine.pause():
            handle = submit(engine, rows()[6])
            with pytest.raises(RequestTimeoutError, match=r"^queue_timeout: "):
                handle.result()
        assert submit(engine, rows()[6]).result().tokens == rows()[6].tokens


def test_generate_takes_a_timeout_priority_and_tenant(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama, max_batch_size=1, policy="priority", **SMALL) as engine, Gate(engine) as gate:
        first = submit(engine, rows()[6])
        gate.arrival()
        order: list[int] = []

        def ask(i: int) -> None:
            out = llama.generate(rows()[i].ids, max_new_tokens=len(rows()[i].tokens), priority=10 - i, tenant=f"t{i}")
            order.append(i)
            assert tuple(out[0, len(rows()[i].prompt) :].tolist()) == rows()[i].tokens

        let = gate.when(lambda: len(inside.inbox(engine)) + engine.stats().waiting == 3)
        assert together([lambda: ask(0), lambda: ask(1), lambda: ask(2), let]) == [None] * 4
        assert first.result().tokens == rows()[6].tokens
        assert order == [2, 1, 0]
        with engine.pause():
            (end,) = together([lambda: llama.generate(rows()[3].ids, max_new_tokens=5, timeout=0.01)])
        assert isinstance(end, RequestTimeoutError)
        assert "deadline" in str(end)
    for wrong in ({"priority": 1.5}, {"tenant": 3}, {"cache_salt": b"x"}, {"timeout": 0}, {"priority": True}):
        with (
            hf_cb.continuous_batching(llama, **SMALL) as engine,
            pytest.raises(hf_cb.InvalidArgumentError, match=rf"^{next(iter(wrong))}: takes"),
        ):
            llama.generate(rows()[3].ids, max_new_tokens=5, **wrong)


def test_a_wait_that_ends_before_the_request(engine: Engine, gate: Gate) -> None:
    row = rows()[6]
    handle = submit(engine, row)
    gate.after(2)
    began = time.monotonic()
    with pytest.raises(RequestTimeoutError, match="has not ended") as caught:
        handle.result(timeout=SHORT)
    assert isinstance(caught.value, TimeoutError)
    assert SHORT <= time.monotonic() - began < SHORT + LATE
    with pytest.raises(RequestTimeoutError):
        handle.result(timeout=0)
    assert not handle.done
    gate.let(float("inf"))
    assert handle.result(timeout=60).tokens == row.tokens  # it went on
    assert engine.stats().finished == {FinishReason.LENGTH: 1}


def test_a_request_that_runs_too_long(engine: Engine, gate: Gate) -> None:
    neighbour = submit(engine, rows()[7], timeout=600)
    handle = submit_long(engine, timeout=SHORT)
    gate.after(4)
    time.sleep(SHORT)
    (row,) = gate.after(1).rows  # the neighbour's
    assert_ends(handle, RequestTimeoutError, r"deadline after \d+ tokens")
    assert handle.finish_reason is FinishReason.TIMEOUT
    assert engine.stats().blocks_used == len(row.memory.block_table)
    gate.let(float("inf"))
    assert neighbour.result().tokens == rows()[7].tokens
    assert engine.stats().finished == {FinishReason.TIMEOUT: 1, FinishReason.LENGTH: 1}
    assert engine.stats().blocks_used == 0


def test_a_request_that_waits_too_long(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama, max_batch_size=1, **SMALL) as engine:
        first = submit_long(engine)
        wait_until(lambda: first.tokens)
        began = time.monotonic()
        with pytest.raises(RequestTimeoutError, match="after 0 tokens"):
            submit(engine, rows()[0], timeout=SHORT).result()
        assert time.monotonic() - began < SHORT + LATE
        assert not first.done
        first.cancel()


def test_a_deadline_in_a_pause(engine: Engine) -> None:
    running = submit_long(engine, timeout=0.3)
    wait_until(lambda: running.tokens)
    with engine.pause():
        came_in = submit(engine, rows()[0], timeout=SHORT)
        steps = engine.stats().steps
        for handle in (came_in, running):
            began = time.monotonic()
            with pytest.raises(RequestTimeoutError, match="deadline"):
                handle.result()
            assert time.monotonic() - began < 0.3 + LATE
        assert engine.stats().blocks_used == 0
        assert engine.stats().steps == steps
    assert submit(engine, rows()[0]).result().tokens == rows()[0].tokens


def test_many_deadlines_in_any_order(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama, **SMALL) as engine, engine.pause():
        timeouts = [0.2, 0.05, 0.15, 0.1, 0.25, 0.05]
        handles = [submit(engine, rows()[0], timeout=timeout) for timeout in timeouts]
        patient = submit(engine, rows()[0], timeout=600)
        assert together([handle.result for handle in handles])
        times = [handle._queue.finished_at - handle._queue.submitted_at for handle in handles]
        assert all(timeout - 0.01 < took < timeout + LATE for timeout, took in zip(timeouts, times, strict=True))
        assert not patient.done
        patient.cancel()


def test_deadlines_of_requests_that_ended_are_not_kept(engine: Engine) -> None:
    for _ in range(5):
        engine.generate_batch([[3, 4]] * 60, max_new_tokens=1, timeout=3600)
    assert len(inside.worker(engine)._answers.deadlines._heap) < 100
