"""Cancelling in every state. Whatever is cancelled, its neighbours' tokens stay right and its blocks come back."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest
from serving import SMALL, Gate, assert_ends, long_row, rows, submit, submit_long, together, wait_until
from transformers import PreTrainedModel

import hf_cb
from hf_cb import Engine, FinishReason, GenerationHandle, RequestCancelledError

pytestmark = pytest.mark.timeout(20)

NEIGHBOUR = 7


@contextlib.contextmanager
def served(model: PreTrainedModel, **options: Any) -> Iterator[tuple[Engine, Gate]]:
    """An engine at a shut gate with a neighbour in it, which must end well, and alone."""
    with hf_cb.continuous_batching(model, **{**SMALL, **options}) as engine:
        with Gate(engine) as gate:
            neighbour = submit(engine, rows()[NEIGHBOUR])
            gate.arrival()
            yield engine, gate
        assert neighbour.result().tokens == rows()[NEIGHBOUR].tokens
        wait_until(lambda: engine.stats().running + engine.stats().waiting == 0)
        assert engine.stats().blocks_used == 0
        assert engine.stats().finished == {FinishReason.LENGTH: 1, FinishReason.CANCELLED: 1}


def assert_cancelled(handle: GenerationHandle, num_tokens: int) -> None:
    assert_ends(handle, RequestCancelledError, f"after {num_tokens} tokens")
    assert handle.finish_reason is FinishReason.CANCELLED
    assert len(handle.tokens) == num_tokens


@pytest.mark.parametrize(
    ("seats", "steps", "running", "waiting", "num_tokens"),
    [
        pytest.param(8, 0, 1, 0, 0, id="in the inbox"),
        pytest.param(1, 2, 1, 1, 0, id="waiting"),
        pytest.param(8, 5, 2, 0, 5, id="running"),  # the first of the six steps is the neighbour's, the sixth still counts
    ],
)
def test_its_neighbour_goes_on_alone(
    llama: PreTrainedModel, seats: int, steps: int, running: int, waiting: int, num_tokens: int
) -> None:
    with served(llama, max_batch_size=seats) as (engine, gate):
        handle = submit_long(engine)
        if steps:
            gate.after(steps)
        assert (engine.stats().running, engine.stats().waiting) == (running, waiting)
        handle.cancel()
        (row,) = gate.after(1).rows
        assert_cancelled(handle, num_tokens)
        assert engine.stats().blocks_used == len(row.memory.block_table)


def test_before_the_first_step_of_all(engine: Engine) -> None:
    with engine.pause():
        handle = submit_long(engine)
        handle.cancel()
        assert_cancelled(handle, 0)
    assert engine.stats().steps == 0


def test_between_the_chunks_of_its_prompt(llama: PreTrainedModel) -> None:
    with served(llama, max_batch_tokens=8) as (engine, gate):
        handle = submit_long(engine)
        gate.let(len(rows()[NEIGHBOUR].prompt) // 8 + 2)
        chunk = gate.arrival().rows[-1]
        assert chunk.request_id == handle.request_id
        assert chunk.start > 0
        assert not chunk.num_logits
        handle.cancel()
        gate.after(1)
        assert_cancelled(handle, 0)


def test_preempted(llama: PreTrainedModel) -> None:
    options: dict[str, Any] = {"block_size": 4, "num_blocks": 32}  # for 128 tokens: one of them, and a part of the other
    with hf_cb.continuous_batching(llama, **options) as engine, Gate(engine) as gate:
        first, second = submit(engine, long_row()), submit(engine, long_row())
        gate.let(1)
        while second.request_id not in gate.arrival().preempted:
            gate.let(1)
        assert second.tokens
        second.cancel()
        gate.after(1)
        assert_cancelled(second, len(second.tokens))
        gate.let(math.inf)
        assert first.result().tokens == long_row().tokens


def test_finished(engine: Engine) -> None:
    handle = submit(engine, rows()[0])
    result = handle.result()
    handle.cancel()
    assert handle.result() == result
    assert list(handle) == list(result.tokens) == list(rows()[0].tokens)
    assert submit(engine, rows()[1]).result().tokens == rows()[1].tokens
    assert engine.stats().finished == {FinishReason.LENGTH: 2}


def test_twice_and_from_many_threads(llama: PreTrainedModel) -> None:
    with served(llama) as (engine, gate):
        handle = submit_long(engine)
        gate.after(2)
        assert together([handle.cancel] * 8) == [None] * 8
        handle.cancel()
        gate.after(1)
        handle.cancel()
        assert_cancelled(handle, 2)


def test_while_others_wait_for_it(llama: PreTrainedModel) -> None:
    with served(llama) as (engine, gate):
        handle = submit_long(engine)

        def cancel() -> None:
            wait_until(lambda: handle._queue._streaming == 4)
            handle.cancel()
            gate.let(1)

        *ends, _ = together([handle.result] * 4 + [lambda: list(handle)] * 4 + [cancel])
        assert [type(end) for end in ends] == [RequestCancelledError] * 8
        assert len({id(end) for end in ends}) == 8  # each its own: a traceback is not shared between threads


def test_while_paused(engine: Engine, gate: Gate) -> None:
    handle = submit_long(engine)
    gate.let(math.inf)
    wait_until(lambda: handle.tokens)
    with engine.pause():
        assert engine.stats().blocks_used > 0
        steps = engine.stats().steps
        handle.cancel()
        assert_cancelled(handle, len(handle.tokens))
        assert engine.stats().blocks_used == 0
        assert engine.stats().steps == steps


@pytest.mark.parametrize("steps", [0, 3])
def test_dropped_without_being_read(llama: PreTrainedModel, steps: int) -> None:
    with served(llama) as (engine, gate):
        handle = submit_long(engine)
        if steps:
            gate.after(steps)
        del handle
        gc.collect()
        assert len(gate.after(1).rows) == 1


def test_dropped_while_paused(engine: Engine) -> None:
    handle = submit_long(engine)
    next(iter(handle))
    with engine.pause():
        del handle
        gc.collect()
    wait_until(lambda: engine.stats().finished == {FinishReason.CANCELLED: 1})
    assert engine.stats().blocks_used == 0


def test_abandoned_iterator(llama: PreTrainedModel) -> None:
    with served(llama) as (engine, gate):
        gate.let(math.inf)
        for token in submit_long(engine):
            assert token == long_row().tokens[0]
            break
        gc.collect()


def test_a_held_handle_outlives_its_iterators(engine: Engine) -> None:
    row = rows()[5]
    handle = submit(engine, row)
    assert next(iter(handle)) == row.tokens[0]
    gc.collect()
    assert tuple(handle) == row.tokens
