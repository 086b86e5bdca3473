"""Two clocks: how long a caller waits, and how long a request may live."""

from __future__ import annotations

import time

import inside
import pytest
from serving import SMALL, Gate, assert_ends, rows, submit, submit_long, together, wait_until
from transformers import PreTrainedModel

import hf_cb
from hf_cb import Engine, FinishReason, RequestTimeoutError

pytestmark = pytest.mark.timeout(20)

SHORT = 0.05  # seconds
LATE = 5.0  # seconds: what no timeout may be late by, on a machine with other things to do


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


def test_while_paused(engine: Engine) -> None:
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
