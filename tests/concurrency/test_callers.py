"""Callers of every kind: idle for long, many at once, two models, any grad mode, autocast, inference tensors."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import models
import pytest
import torch
from serving import SMALL, Gate, ask, plain, rows, submit, together, wait_until
from transformers import PreTrainedModel

import hf_cb
from hf_cb import Engine

pytestmark = pytest.mark.timeout(20)

IDLE = 3.0  # seconds
LITTLE_CPU = 0.15  # of one core: what a process with many threads that only wait may use


def cpu_share(seconds: float) -> float:
    """What share of one core this process uses while the calling thread sleeps."""
    began, cpu = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    return (time.process_time() - cpu) / (time.perf_counter() - began)


def test_idle_for_long(llama: PreTrainedModel, engine: Engine) -> None:
    assert ask(llama, rows()[0]) == rows()[0].tokens
    steps = engine.stats().steps
    assert cpu_share(IDLE) < LITTLE_CPU
    assert engine.stats().steps == steps
    assert ask(llama, rows()[1]) == rows()[1].tokens


def test_sixty_four_blocked_callers(llama: PreTrainedModel, engine: Engine) -> None:
    row = rows()[0]

    def wait_with(how: int) -> tuple[int, ...]:
        if how == 0:
            return ask(llama, row)
        handle = submit(engine, row, timeout=600 if how == 1 else None)
        return tuple(handle) if how == 2 else handle.result(timeout=600).tokens

    with engine.pause():
        calls = [lambda how=i % 4: wait_with(how) for i in range(64)]
        results: list[object] = []
        runner = threading.Thread(target=lambda: results.extend(together(calls)), daemon=True)
        runner.start()
        wait_until(lambda: engine.stats().waiting == 64)
        assert cpu_share(1.0) < LITTLE_CPU
    runner.join()
    assert results == [row.tokens] * 64


def test_who_waits_for_the_end_is_woken_once(engine: Engine, gate: Gate) -> None:
    handle = submit(engine, rows()[6])
    gate.arrival()
    changed, wakings = handle._queue._changed, []
    notify_all = changed.notify_all
    changed.notify_all = lambda: (wakings.append(len(changed._waiters)), notify_all())

    assert together([lambda: handle.result().tokens, gate.when(lambda: changed._waiters)]) == [rows()[6].tokens, None]
    assert wakings == [1]


def test_two_models_at_once(llama: PreTrainedModel) -> None:
    gpt2 = models.tiny("gpt2")
    with hf_cb.continuous_batching(llama, **SMALL) as one, hf_cb.continuous_batching(gpt2, **SMALL) as other:
        jobs = [(model, row) for name, model in (("llama", llama), ("gpt2", gpt2)) for row in rows(name, 8)]
        results = together([lambda model=model, row=row: ask(model, row) for model, row in jobs])
        assert results == [row.tokens for _, row in jobs]
        for engine in (one, other):
            assert sum(engine.stats().finished.values()) == 8
            assert engine.stats().native_calls == {}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("install_inside", [True, False])
def test_grad_modes(llama: PreTrainedModel, mode: Callable[[], AbstractContextManager[None]], install_inside: bool) -> None:
    """Tensors made in one mode are used in another: of the installing thread, the callers and the engine's own."""

    def call() -> tuple[int, ...]:
        with mode():
            return ask(llama, rows()[2])

    with mode() if install_inside else contextlib.nullcontext():
        engine = hf_cb.install(llama, **SMALL)
    assert together([call] * 4 + [lambda: ask(llama, rows()[3])] * 4) == [rows()[2].tokens] * 4 + [rows()[3].tokens] * 4
    assert engine.stats().native_calls == {}
    hf_cb.uninstall(llama)
    logits = llama(rows()[2].ids).logits  # the model can still be trained
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in llama.parameters())


def test_inference_tensors_as_inputs(llama: PreTrainedModel, engine: Engine) -> None:
    row = rows()[3]
    with torch.inference_mode():
        ids, mask = row.ids, torch.ones(1, len(row.prompt), dtype=torch.int64)
    assert ids.is_inference()
    out = llama.generate(ids, attention_mask=mask, max_new_tokens=len(row.tokens))
    assert tuple(out[0, len(row.prompt) :].tolist()) == row.tokens
    assert engine.submit(ids, max_new_tokens=len(row.tokens)).result().tokens == row.tokens
    assert engine.stats().native_calls == {}


def test_autocast(llama: PreTrainedModel, engine: Engine) -> None:
    row = rows()[5]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        truth = plain(llama, row.prompt, len(row.tokens))
    assert truth != row.tokens  # else the test could not tell

    def call() -> tuple[int, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ask(llama, row)

    results = together([call] * 2 + [lambda: ask(llama, row)] * 4)
    assert results == [truth] * 2 + [row.tokens] * 4
    ((reason, count),) = engine.stats().native_calls.items()
    assert "autocast" in reason
    assert count == 2


def test_installed_under_autocast(llama: PreTrainedModel) -> None:
    """The engine's thread knows nothing of it: what the caller's mode would change must not get into the twin."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine = hf_cb.install(llama, **SMALL)
    assert ask(llama, rows()[5]) == rows()[5].tokens
    assert engine.stats().native_calls == {}
    hf_cb.uninstall(llama)


def test_the_callers_random_numbers_are_left_alone(llama: PreTrainedModel, engine: Engine) -> None:
    before = torch.get_rng_state()
    ask(llama, rows()[1])
    ask(llama, rows()[1], do_sample=True, seed=3)
    engine.submit(rows()[1].prompt, max_new_tokens=4, do_sample=True, seed=3).result()
    assert torch.equal(torch.get_rng_state(), before)
