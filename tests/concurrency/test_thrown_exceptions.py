"""An exception that another thread throws into one that waits, as func_timeout and stopit do, ends the wait soon."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import inside
import pytest
import torch
from serving import LONG, SMALL, Gate, ask, long_row, plain, rows, submit, submit_long, wait_until
from transformers import PreTrainedModel

import hf_cb
from hf_cb import Engine, FinishReason
from hf_cb.blocking import holding

pytestmark = pytest.mark.timeout(30)

SOON = 0.9  # seconds


class Stop(Exception):
    """What is thrown."""


class Waiter:
    """A thread in a call, and how that ended."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.outcome: Any = None
        self.thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self.thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self.outcome = call()
        except BaseException as error:
            self.outcome = error.with_traceback(None)

    def throw(self) -> None:
        assert self.thread.ident is not None
        assert self.thread.is_alive(), self.outcome
        threw = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread.ident), ctypes.py_object(Stop))
        assert threw == 1


def assert_stopped(waiters: list[Waiter]) -> None:
    time.sleep(0.1)  # let them come to their waits
    for waiter in waiters:
        waiter.throw()
    began = time.monotonic()
    for waiter in waiters:
        waiter.thread.join(SOON + began - time.monotonic())
    assert [type(waiter.outcome) for waiter in waiters] == [Stop] * len(waiters)


def test_whoever_waits_for_tokens(llama: PreTrainedModel, engine: Engine, gate: Gate) -> None:
    """Their requests are cancelled, and give their blocks back; the neighbour goes on."""
    neighbour = rows()[7]
    other = submit(engine, neighbour)
    gate.arrival()
    handles = [submit_long(engine) for _ in range(2)]
    waiters = [
        Waiter(lambda: llama.generate(long_row().ids, max_new_tokens=LONG)),
        Waiter(lambda: llama.generate(long_row().ids.repeat(3, 1), max_new_tokens=LONG)),
        Waiter(lambda: engine.generate_batch([long_row().prompt] * 2, max_new_tokens=LONG)),
        Waiter(handles[0].result),
        Waiter(lambda: list(handles[1])),
    ]
    wait_until(lambda: len(inside.inbox(engine)) == 8)
    assert_stopped(waiters)
    gate.let(math.inf)
    assert other.result().tokens == neighbour.tokens
    wait_until(lambda: engine.stats().finished == {FinishReason.LENGTH: 1, FinishReason.CANCELLED: 8})
    assert engine.stats().blocks_used == 0
    assert ask(llama, neighbour) == neighbour.tokens


def test_whoever_waits_for_the_engine(llama: PreTrainedModel, engine: Engine, gate: Gate) -> None:
    """For a pause, for a new twin, for its turn at it, for the thread's end: and the engine serves on."""
    row = rows()[6]
    handle = submit(engine, rows()[7])
    gate.arrival()

    def pause() -> None:
        with engine.pause():
            raise AssertionError("the step stands at the gate")

    waiters = [Waiter(pause)]
    time.sleep(0.1)
    llama.lm_head = torch.nn.Linear(48, llama.config.vocab_size, bias=False)
    waiters += [Waiter(lambda: ask(llama, row)) for _ in range(2)]
    wait_until(lambda: inside.inbox(engine))  # one has made the new twin, the other waits for it
    assert_stopped(waiters)
    assert not inside.num_pauses(engine)
    gate.let(math.inf)
    assert handle.result().tokens == rows()[7].tokens
    truth = plain(llama, row.prompt, len(row.tokens))
    assert ask(llama, row) == truth
    assert engine.stats().native_calls == {}


def test_whoever_waits_for_its_turn_or_for_the_end(llama: PreTrainedModel) -> None:
    go, runs = threading.Event(), threading.Event()

    def hold(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        runs.set()
        go.wait()
        return scores

    native: dict[str, Any] = {"guidance_scale": 1.5, "max_new_tokens": 2, "logits_processor": [hold]}
    engine = hf_cb.install(llama, **SMALL)
    with Gate(engine) as gate:
        first = Waiter(lambda: llama.generate(rows()[0].ids, seed=1, **native))
        assert runs.wait(10)
        handle = submit(engine, rows()[7])
        gate.arrival()
        behind_it = Waiter(lambda: llama.generate(rows()[0].ids, **native))
        wait_until(lambda: sum(engine.stats().native_calls.values()) == 2)  # it is on its way to the lock
        assert_stopped([behind_it, Waiter(engine.shutdown)])
        go.set()
        gate.let(math.inf)
        assert handle.result().tokens == rows()[7].tokens
        first.thread.join(10)
        assert first.outcome.shape[1] == len(rows()[0].prompt) + 2
    hf_cb.uninstall(llama)


def test_a_request_that_nobody_was_given(engine: Engine, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thrown between the door and the handle."""
    neighbour = submit(engine, rows()[7])
    gate.arrival()
    take_in = inside.worker(engine).submit

    def interrupted(queues: Any) -> None:
        take_in(queues)
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(inside.worker(engine), "submit", interrupted)
        with pytest.raises(Stop):
            submit_long(engine)
    gate.let(math.inf)
    assert neighbour.result().tokens == rows()[7].tokens
    wait_until(lambda: engine.stats().finished.get(FinishReason.CANCELLED) == 1)


def test_whoever_gets_the_lock_at_that_very_moment(llama: PreTrainedModel) -> None:
    """What is thrown while it waits in C is raised once it has the lock: the lock must be given back all the same."""
    lock, ids = threading.RLock(), rows()[7].ids
    engine = hf_cb.install(llama, **SMALL)
    assert ask(llama, rows()[7]) == rows()[7].tokens

    def take() -> None:
        with holding(lock):
            time.sleep(0)

    locks_and_callers: list[tuple[Any, Callable[[], Any]]] = [
        (lock, take),
        (inside.worker(engine)._lock, lambda: llama.generate(ids, max_new_tokens=2)),
        (vars(llama)["generate"].backend._plain_lock, lambda: llama.generate(ids, max_new_tokens=2, guidance_scale=1.5)),
    ]
    for held, call in locks_and_callers:
        with held:
            waiter = Waiter(call)
            time.sleep(0.1)
            waiter.throw()
        waiter.thread.join(SOON)
        assert type(waiter.outcome) is Stop
        free = Waiter(lambda held=held: held.acquire(timeout=1) and held.release() is None)  # type: ignore[misc]
        free.thread.join(2)
        assert free.outcome is True
    assert ask(llama, rows()[7]) == rows()[7].tokens
    hf_cb.uninstall(llama)
