"""What fails takes down no more than it must, and whoever waits learns of it at once, with the cause."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import inside
import pytest
import torch
from serving import LONG, SMALL, Gate, ask, doors, long_row, rows, submit, submit_long, together, wait_until
from transformers import PreTrainedModel

import hf_cb
from hf_cb import Engine, EngineDeadError, FinishReason, RequestFailedError
from hf_cb.core.output import SchedulerOutput, StepResult

pytestmark = pytest.mark.timeout(20)

SOON = 5.0  # seconds, of which a busy machine may take a few


class Boom(Exception):
    pass


def raise_once(owner: object, name: str, error: BaseException) -> None:
    """Replace the method by one that raises at its first call and puts the original back."""
    original = getattr(owner, name)

    def fail(*args: Any) -> Any:
        setattr(owner, name, original)
        raise error

    setattr(owner, name, fail)


ERRORS = [Boom("it broke"), torch.OutOfMemoryError("no memory"), AssertionError("odd")]


@pytest.mark.parametrize("method", ["execute", "forward", "_forward"])
@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_step_that_fails_once_is_repeated(llama: PreTrainedModel, method: str, error: Exception) -> None:
    with hf_cb.continuous_batching(llama, max_batch_size=2, **SMALL) as engine:
        with Gate(engine) as gate:
            handles = [submit(engine, row) for row in rows()[6:10]]
            gate.after(3)
            if method == "execute":
                raise_once(gate, "_execute", error)
            else:
                raise_once(inside.runner(engine), method, error)
        assert [handle.result().tokens for handle in handles] == [row.tokens for row in rows()[6:10]]
        assert engine.stats().finished == {FinishReason.LENGTH: 4}


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("offender", range(6))
def test_only_the_offender_of_a_step_fails(llama: PreTrainedModel, engine: Engine, error: Exception, offender: int) -> None:
    with Gate(engine) as gate:
        handles = [submit(engine, row) for row in rows()[6:12]]
        gate.after(4)
        execute, culprit = gate._execute, handles[offender].request_id

        def fail_with_the_culprit(output: SchedulerOutput) -> StepResult:
            if any(row.request_id == culprit for row in output.rows):
                raise error
            return execute(output)

        gate._execute = fail_with_the_culprit
    for i, (handle, row) in enumerate(zip(handles, rows()[6:12], strict=True)):
        if i != offender:
            assert handle.result().tokens == row.tokens
    with pytest.raises(RequestFailedError, match=type(error).__name__) as caught:
        handles[offender].result()
    assert caught.value.__cause__ is error
    assert handles[offender].tokens == rows()[6 + offender].tokens[: len(handles[offender].tokens)] != ()
    assert engine.stats().finished == {FinishReason.FAILED: 1, FinishReason.LENGTH: 5}
    assert ask(llama, rows()[6]) == rows()[6].tokens


def test_a_step_that_fails_whatever_is_left_out(llama: PreTrainedModel) -> None:
    """Those in it end after a few attempts; those who waited are served."""
    error = Boom("it broke")
    with hf_cb.continuous_batching(llama, max_batch_size=32, **SMALL) as engine, Gate(engine) as gate:
        in_the_step = [submit_long(engine) for _ in range(32)]
        wait_until(lambda: engine.stats().running == 0 or gate._standing)
        waiting = [submit(engine, rows()[8]), submit(engine, rows()[9])]
        gate.let(6)
        assert len(gate.arrival().rows) == 32
        execute, attempts = gate._execute, []

        def fail(output: SchedulerOutput) -> StepResult:
            attempts.append(len(output.rows))
            if any(handle.request_id == output.rows[0].request_id for handle in in_the_step):
                raise error
            return execute(output)

        gate._execute = fail
        gate.let(float("inf"))
        for handle in in_the_step:
            with pytest.raises(RequestFailedError, match="Boom") as caught:
                handle.result()
            assert caught.value.__cause__ is error
        assert [handle.result().tokens for handle in waiting] == [row.tokens for row in rows()[8:10]]
        assert attempts[0] == 32
        assert 2 < attempts.count(1) < 32
        assert engine.stats().finished == {FinishReason.FAILED: 32, FinishReason.LENGTH: 2}
        assert engine.stats().blocks_used == 0


def test_every_waiter_has_its_own_exception(engine: Engine, gate: Gate) -> None:
    handle = submit_long(engine)
    gate.arrival()
    raise_once(gate, "_execute", Boom())

    let = gate.when(lambda: handle._queue._streaming == 2)
    *ends, _ = together([handle.result, handle.result, lambda: list(handle), lambda: list(handle), let])
    assert [type(end) for end in ends] == [RequestFailedError] * 4
    assert len({id(end) for end in ends}) == 4


def test_the_rest_of_a_batch_does_not_go_on_for_nobody(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama, max_batch_size=1, **SMALL) as engine:
        raise_once(inside.runner(engine), "execute", Boom())
        with pytest.raises(RequestFailedError) as kept:
            engine.generate_batch([row.prompt for row in rows()[:3]], max_new_tokens=LONG)
        assert kept.tb  # which holds the handles: it is not their being dropped that ends the requests
        wait_until(lambda: sum(engine.stats().finished.values()) == 3)
        assert engine.stats().finished == {FinishReason.FAILED: 1, FinishReason.CANCELLED: 2}


@pytest.mark.parametrize("do_sample", [True, False])
def test_one_row_whose_logits_are_not_numbers(engine: Engine, gate: Gate, do_sample: bool) -> None:
    runner = inside.runner(engine)
    sampled = engine.submit(rows()[4].prompt, max_new_tokens=9, do_sample=do_sample, seed=1)
    gate.arrival()
    greedy = submit(engine, rows()[5])
    output = gate.after(2)
    forward = runner.forward

    def poisoned(batch: Any) -> torch.Tensor:
        logits = forward(batch)
        logits[batch.sampling_ids.index(sampled.request_id)] = float("nan")
        return logits

    assert len(output.rows) == 2
    runner.forward = poisoned
    gate.after(1)
    runner.forward = forward
    gate.let(float("inf"))
    with pytest.raises(RequestFailedError):
        sampled.result()
    assert greedy.result().tokens == rows()[5].tokens
    assert engine.stats().finished == {FinishReason.FAILED: 1, FinishReason.LENGTH: 1}


@pytest.mark.parametrize("cause", [EngineDeadError, torch.AcceleratorError, SystemExit])
def test_an_engine_that_dies(llama: PreTrainedModel, cause: type[BaseException]) -> None:
    def execute(output: SchedulerOutput) -> StepResult:
        if cause is EngineDeadError:  # the engine's own, of a step that answers nothing
            return StepResult({})
        raise cause("lost")

    engine = hf_cb.install(llama, max_batch_size=1, **SMALL)
    with Gate(engine) as gate:
        running, waiting = submit_long(engine), submit_long(engine)
        gate.after(2)
        unseen = submit_long(engine)  # still in the inbox

        async def wait() -> None:
            await running

        def die() -> float:
            wait_until(lambda: running._queue._streaming == 1 and running._queue._tasks)
            gate._execute = execute
            gate.let(1)
            return time.monotonic()

        def generate() -> object:
            return ask(llama, rows()[0])

        waits = [running.result, waiting.result, unseen.result, lambda: list(running), lambda: asyncio.run(wait()), generate]
        *ends, died = together([*waits, die])
        assert isinstance(died, float)
        assert time.monotonic() - died < SOON
    for end in ends:
        assert isinstance(end, EngineDeadError)
        assert isinstance(end.__cause__, cause)
    assert running.tokens == long_row().tokens[:2]

    for call in doors(llama, engine):
        with pytest.raises(EngineDeadError) as caught:
            call()
        assert isinstance(caught.value.__cause__, cause)
    hf_cb.uninstall(llama)
    with hf_cb.continuous_batching(llama, **SMALL):
        assert together([lambda: ask(llama, rows()[0])]) == [rows()[0].tokens]


def test_an_engine_that_dies_while_others_pause_it(engine: Engine, gate: Gate) -> None:
    handle = submit_long(engine)
    gate.arrival()
    gate._execute = lambda output: StepResult({})

    def pause() -> None:
        with engine.pause():
            pass

    *ends, _ = together([pause, pause, gate.when(lambda: inside.num_pauses(engine) == 2)])
    assert [type(end) for end in ends] == [EngineDeadError] * 2
    assert handle.done
