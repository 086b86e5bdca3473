"""Closing an engine while others use it."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable

import inside
import pytest
from serving import SMALL, Gate, ask, assert_ends, doors, long_row, rows, submit, submit_long, tiny_llama, together, wait_until
from transformers import PreTrainedModel

import hf_cb
from hf_cb import Engine, EngineClosedError, FinishReason, GenerationHandle, RequestCancelledError

pytestmark = pytest.mark.timeout(20)

NUM_THREADS = 8


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hf_cb-engine"]


@pytest.mark.parametrize("drain", [True, False])
def test_submits_while_it_closes(llama: PreTrainedModel, drain: bool) -> None:
    engine = hf_cb.install(llama, **SMALL)
    submitted: list[list[tuple[int, GenerationHandle]]] = [[] for _ in range(NUM_THREADS)]

    def submit_until_closed(mine: list[tuple[int, GenerationHandle]]) -> None:
        for i in itertools.count():
            row = rows()[i % len(rows())]
            mine.append((i % len(rows()), submit(engine, row)))
            time.sleep(0.005)  # else thousands come in before the first ends

    def close() -> None:
        wait_until(lambda: engine.stats().finished)  # all threads are in the middle of it
        engine.shutdown(drain=drain)

    *ends, closed = together([*(lambda mine=mine: submit_until_closed(mine) for mine in submitted), close])
    assert closed is None
    assert [type(end) for end in ends] == [EngineClosedError] * NUM_THREADS
    handles = [pair for mine in submitted for pair in mine]
    assert all(handle.done for _, handle in handles)  # now, not later: shutdown returned
    num_refused = 0
    for i, handle in handles:
        truth = rows()[i].tokens
        try:
            assert handle.result().tokens == truth
        except EngineClosedError:
            num_refused += 1
            assert handle.tokens == truth[: len(handle.tokens)]
            assert handle.finish_reason is FinishReason.FAILED
    assert (num_refused == 0) == drain
    assert engine.stats().finished[FinishReason.LENGTH] == len(handles) - num_refused  # each of them once
    assert len(handles) - num_refused > 0
    assert not engine_threads()
    hf_cb.uninstall(llama)


def test_generate_while_it_is_uninstalled(llama: PreTrainedModel) -> None:
    engine = hf_cb.install(llama, **SMALL)
    generate = llama.generate  # a caller may have looked it up just before

    gone = threading.Event()

    def call_beyond_the_end(first: int) -> int:
        """What comes too late for the engine runs plainly."""
        done, is_last = 0, False
        while not is_last:
            is_last = gone.is_set()
            row = rows()[(first + done) % len(rows())]
            out = generate(row.ids, max_new_tokens=len(row.tokens))
            assert tuple(out[0, len(row.prompt) :].tolist()) == row.tokens
            done += 1
        return done

    def uninstall() -> int:
        wait_until(lambda: engine.stats().finished)  # all threads are in the middle of it
        hf_cb.uninstall(llama)
        gone.set()
        return 1

    done = together([*(lambda i=i: call_beyond_the_end(i) for i in range(NUM_THREADS)), uninstall])
    assert all(isinstance(n, int) for n in done), done
    assert sum(done) > 1
    assert ask(llama, rows()[0]) == rows()[0].tokens
    assert not engine_threads()


def test_afterwards_every_door_is_closed(llama: PreTrainedModel, engine: Engine) -> None:
    row = rows()[0]
    assert ask(llama, row) == row.tokens
    engine.shutdown()
    engine.shutdown(drain=False)
    for call in doors(llama, engine):
        with pytest.raises(EngineClosedError):
            call()
    assert engine.stats().finished == {FinishReason.LENGTH: 1}


def test_running_and_waiting_end_when_it_does_not_drain(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama, max_batch_size=1, **SMALL) as engine, Gate(engine) as gate:
        handles = [submit_long(engine) for _ in range(3)]
        gate.after(3)
        closing = threading.Thread(target=engine.shutdown, daemon=True)  # drains, and would for long
        closing.start()
        wait_until(lambda: inside.closing(engine))
        gate.after(1)
        impatient = threading.Thread(target=engine.shutdown, kwargs={"drain": False}, daemon=True)
        impatient.start()
        wait_until(lambda: inside.closing(engine) == "now")
        gate.let(1)
        closing.join()
        impatient.join()
        assert [len(handle.tokens) for handle in handles] == [5, 0, 0]
        for handle in handles:
            assert_ends(handle, EngineClosedError, "shut down before")


def test_many_close_it_at_once(engine: Engine) -> None:
    handle = submit(engine, rows()[3])
    assert together([engine.shutdown] * NUM_THREADS) == [None] * NUM_THREADS
    assert handle.result().tokens == rows()[3].tokens


@pytest.mark.parametrize("handle_is_kept", [True, False])
def test_a_model_that_is_dropped_takes_its_engine_along(handle_is_kept: bool) -> None:
    model = tiny_llama()
    engine = hf_cb.install(model, **SMALL)
    row = long_row()
    handle = submit(engine, row)
    gone = weakref.ref(model)
    del model, engine
    gc.collect()
    assert gone() is None
    if handle_is_kept:
        assert handle.result().tokens == row.tokens
    del handle
    wait_until(lambda: not engine_threads())


@pytest.mark.parametrize("action", [hf_cb.install, hf_cb.uninstall])
def test_only_one_of_many_installs_or_uninstalls(llama: PreTrainedModel, action: Callable[..., object]) -> None:
    if action is hf_cb.uninstall:
        hf_cb.install(llama, **SMALL)
    results = together([lambda: action(llama)] * NUM_THREADS)
    refusals = (hf_cb.AlreadyInstalledError, hf_cb.NotInstalledError)
    assert sum(isinstance(result, refusals) for result in results) == NUM_THREADS - 1
    if action is hf_cb.install:
        hf_cb.uninstall(llama)


def test_a_thread_that_cannot_start_leaves_nothing_behind(
    llama: PreTrainedModel, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = rows()[2]

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            engine.submit(row.prompt, max_new_tokens=4)
    assert ask(llama, row) == row.tokens
    assert engine.stats().finished == {FinishReason.LENGTH: 1}  # the refused one did not come along


def test_cancel_after_the_end_of_the_engine(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama, **SMALL) as engine, Gate(engine) as gate:
        handle = submit_long(engine)
        gate.arrival()
        handle.cancel()
    with pytest.raises(RequestCancelledError):
        handle.result()
    handle.cancel()
    assert handle.finish_reason is FinishReason.CANCELLED
