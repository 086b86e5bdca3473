"""pause(): no step runs inside, whoever else is about, and what came in meanwhile is served afterwards."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref

import inside
import pytest
import torch
from serving import Gate, ask, long_row, plain, rows, submit, submit_long, together, wait_until
from transformers import PreTrainedModel

import hf_cb
from hf_cb import Engine, EngineClosedError, GenerationHandle

pytestmark = pytest.mark.timeout(20)

LOOK = 0.2  # seconds in which dozens of steps would run


def test_no_step_runs_inside(engine: Engine) -> None:
    """Nor after a pause within it."""
    before = [submit(engine, row) for row in (long_row(), *rows()[:4])]
    wait_until(lambda: engine.stats().steps > 3)
    with engine.pause():
        steps = engine.stats().steps
        meanwhile = [submit(engine, row) for row in rows()[4:8]]
        with engine.pause():
            pass
        time.sleep(LOOK)
        assert engine.stats().steps == steps
        assert not any(handle.tokens for handle in meanwhile)
        assert not before[0].done
    assert [handle.result().tokens for handle in before] == [row.tokens for row in (long_row(), *rows()[:4])]
    assert [handle.result().tokens for handle in meanwhile] == [row.tokens for row in rows()[4:8]]


def test_it_waits_for_the_step_in_flight(engine: Engine, gate: Gate) -> None:
    submit_long(engine)
    handle = submit(engine, rows()[0])
    gate.arrival()
    entered, leave = threading.Event(), threading.Event()

    def pause() -> None:
        with engine.pause():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=pause, daemon=True)
    thread.start()
    wait_until(lambda: inside.num_pauses(engine))
    assert not entered.wait(0.05)
    gate.let(float("inf"))
    assert entered.wait(5)
    steps = engine.stats().steps
    time.sleep(0.05)
    assert engine.stats().steps == steps
    leave.set()
    thread.join()
    assert handle.result().tokens == rows()[0].tokens


def test_from_many_threads(llama: PreTrainedModel, engine: Engine) -> None:

    def pause_again_and_again() -> None:
        for _ in range(20):
            with engine.pause():
                steps = engine.stats().steps
                time.sleep(0.002)
                assert engine.stats().steps == steps

    def call() -> list[tuple[int, ...]]:
        return [ask(llama, row) for row in rows()[:6]]

    results = together([pause_again_and_again] * 3 + [call] * 3)
    assert results == [None] * 3 + [[row.tokens for row in rows()[:6]]] * 3


@pytest.mark.parametrize("drain", [True, False])
def test_shutdown_inside(engine: Engine, drain: bool) -> None:
    handle = submit(engine, long_row())
    with engine.pause():
        came_in = submit(engine, rows()[0])
        engine.shutdown(drain=drain)
        with pytest.raises(EngineClosedError), engine.pause():
            pass
    for ended, row in ((handle, long_row()), (came_in, rows()[0])):
        with contextlib.nullcontext() if drain else pytest.raises(EngineClosedError):
            assert ended.result().tokens == row.tokens


def test_shutdown_while_another_thread_pauses(engine: Engine) -> None:
    leave, entered = threading.Event(), threading.Event()

    def pause() -> GenerationHandle:
        with engine.pause():
            handle = submit(engine, rows()[0])
            entered.set()
            leave.wait()
            return handle

    def shut_down() -> None:
        entered.wait()
        engine.shutdown()
        leave.set()

    handle, _ = together([pause, shut_down])
    assert isinstance(handle, GenerationHandle)
    assert handle.result().tokens == rows()[0].tokens


@pytest.mark.parametrize("in_flight", [True, False])
def test_weights_changed_in_place_inside(llama: PreTrainedModel, engine: Engine, in_flight: bool) -> None:
    row = rows()[6]
    if in_flight:
        long = submit_long(engine)
        wait_until(lambda: long.tokens)
    with engine.pause(), torch.no_grad():
        for layer in llama.model.layers:
            layer.self_attn.v_proj.weight.neg_()
        llama.lm_head.weight.mul_(torch.linspace(-1, 1, len(llama.lm_head.weight))[:, None])
        came_in = submit(engine, row)
    truth = plain(llama, row.prompt, len(row.tokens))
    assert truth != row.tokens
    assert came_in.result().tokens == truth
    assert together([lambda: ask(llama, row)] * 4) == [truth] * 4
    assert engine.stats().native_calls == {}
    engine.shutdown(drain=False)


def test_a_pause_that_is_interrupted_does_not_last(
    llama: PreTrainedModel, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(llama, rows()[0]) == rows()[0].tokens

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(inside.worker(engine)._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), engine.pause():
            pass
    assert ask(llama, rows()[1]) == rows()[1].tokens


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("outer", [True, False])
def test_the_kv_memory_is_given_back_inside(engine: Engine, outer: bool, started: bool) -> None:
    """By the outer of two pauses, or by the inner one."""
    cache = inside.cache(engine)
    handles, truths = [], []
    if started:
        handles, truths = [submit(engine, long_row()), submit(engine, rows()[1])], [long_row().tokens, rows()[1].tokens]
        wait_until(lambda: handles[0].tokens)
    memory = [weakref.ref(tensor) for kv in cache.layers for tensor in kv]
    with engine.pause(release_kv=outer):
        assert all(ref() is None for ref in memory) == cache.is_released == outer
        with engine.pause(release_kv=True):
            assert all(ref() is None for ref in memory)
            assert engine.stats().blocks_used == 0
            handles.append(submit(engine, rows()[2]))
        inside.scheduler(engine).check()
    assert [handle.result().tokens for handle in handles] == [*truths, rows()[2].tokens]
    assert not cache.is_released


def test_kv_memory_that_is_not_to_be_had_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine.pause(release_kv=True):
        handle = submit(engine, rows()[2])
        cause = MemoryError("somebody took it")

        def fail(*args: object) -> None:
            raise cause

        monkeypatch.setattr(inside.cache(engine), "restore", fail)
    with pytest.raises(hf_cb.EngineDeadError, match="somebody took it") as caught:
        handle.result()
    assert caught.value.__cause__ is cause


def test_who_has_paused_it_is_answered_natively(llama: PreTrainedModel, engine: Engine) -> None:
    with engine.pause():
        assert ask(llama, rows()[3]) == rows()[3].tokens
        assert list(engine.stats().native_calls) == ["this thread has paused the engine"]
    assert ask(llama, rows()[3]) == rows()[3].tokens
    assert sum(engine.stats().native_calls.values()) == 1


def test_who_has_paused_it_asks_a_model_that_has_changed_in_vain(llama: PreTrainedModel, engine: Engine) -> None:
    assert ask(llama, rows()[3]) == rows()[3].tokens
    with engine.pause():
        llama.lm_head.weight = torch.nn.Parameter(llama.lm_head.weight.detach().clone())
        with pytest.raises(hf_cb.UnsupportedCallError, match=r"^pause: the model has changed"):
            engine.submit(rows()[3].prompt)
    assert ask(llama, rows()[3]) == rows()[3].tokens
