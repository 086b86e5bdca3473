"""The model stays its user's: plain use of it is right while the engine serves, and nothing of it changes but `generate`."""

from __future__ import annotations

import threading

import pytest
import torch
from serving import SMALL, ask, plain, rows, together
from snapshots import snapshot
from transformers import PreTrainedModel

import hf_cb
from hf_cb import Engine

pytestmark = pytest.mark.timeout(20)

NUM_THREADS = 16


def test_plain_use_while_sixteen_threads_are_served(llama: PreTrainedModel) -> None:
    row, served = rows()[6], rows()
    with torch.no_grad():
        logits = llama(row.ids).logits
    before = snapshot(llama)
    stop = threading.Event()

    def serve(first: int) -> int:
        done = 0
        while not stop.is_set():
            wanted = served[(first + done) % len(served)]
            assert ask(llama, wanted) == wanted.tokens
            done += 1
        return done

    def use_plainly() -> int:
        try:
            for _ in range(10):
                with torch.no_grad():
                    assert torch.equal(llama(row.ids).logits, logits)
                assert plain(llama, row.prompt, len(row.tokens)) == row.tokens
                assert snapshot(llama) == before
            return engine.stats().running
        finally:
            stop.set()

    with hf_cb.continuous_batching(llama, **SMALL) as engine:
        results = together([*(lambda i=i: serve(i) for i in range(NUM_THREADS)), use_plainly])
        assert all(isinstance(result, int) and result > 0 for result in results), results
        assert engine.stats().native_calls == {}
    assert "generate" not in vars(llama)
    assert snapshot(llama) == before
    with torch.no_grad():
        assert torch.equal(llama(row.ids).logits, logits)


def test_native_calls_beside_served_ones(llama: PreTrainedModel, engine: Engine) -> None:
    """Guidance runs natively: one call at a time, exact, and the served ones don't wait for it."""
    row = rows()[6]
    truth = plain(llama, row.prompt, len(row.tokens), guidance_scale=1.5)
    assert truth != row.tokens
    results = together(
        [lambda: ask(llama, row, guidance_scale=1.5)] * 4 + [lambda row=row: ask(llama, row) for row in rows()[:8]]
    )
    assert results == [truth] * 4 + [row.tokens for row in rows()[:8]]
    assert sum(engine.stats().native_calls.values()) == 4


def test_twice(llama: PreTrainedModel) -> None:
    before = snapshot(llama)
    for _ in range(2):
        engine = hf_cb.install(llama, **SMALL)
        assert snapshot(llama) == before
        assert together([lambda row=row: ask(llama, row) for row in rows()[:4]]) == [row.tokens for row in rows()[:4]]
        assert engine.stats().finished == {hf_cb.FinishReason.LENGTH: 4}  # the counters start anew
        assert engine.stats().native_calls == {}
        hf_cb.uninstall(llama)
        assert snapshot(llama) == before
        assert "generate" not in vars(llama)
    assert ask(llama, rows()[0]) == rows()[0].tokens
