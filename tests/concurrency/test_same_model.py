"""The model stays its user's: plain use of it is right while the engine serves, and nothing of it changes but `generate`."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from serving import SMALL, ask, plain, rows, together
from transformers import PreTrainedModel

import hf_cb
from hf_cb import Engine

pytestmark = pytest.mark.timeout(20)

NUM_THREADS = 16


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """All that serving must leave as it is."""
    return {
        "vars": dict(vars(model)),
        "config": model.config.to_dict(),
        "config vars": {key: value for key, value in vars(model.config).items() if not key.startswith("__")},
        "generation_config": model.generation_config.to_dict(),
        "attention": model.config._attn_implementation,
        "modules": [(name, type(module), id(module), sorted(vars(module))) for name, module in model.named_modules()],
        "parameters": [(name, id(parameter), parameter._version) for name, parameter in model.named_parameters()],
        "buffers": [(name, id(buffer), buffer._version) for name, buffer in model.named_buffers()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
    }


def without_generate(taken: dict[str, Any]) -> dict[str, Any]:
    """The same, without the one attribute that is ours."""
    (name, kind, key, names), *others = taken["modules"]
    own = [attribute for attribute in names if attribute != "generate"]
    held = {key: value for key, value in taken["vars"].items() if key != "generate"}
    return {**taken, "vars": held, "modules": [(name, kind, key, own), *others]}


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
                assert without_generate(snapshot(llama)) == before
            return engine.stats().running
        finally:
            stop.set()

    with hf_cb.continuous_batching(llama, **SMALL) as engine:
        results = together([*(lambda i=i: serve(i) for i in range(NUM_THREADS)), use_plainly])
        assert all(isinstance(result, int) and result > 0 for result in results), results
        assert engine.stats().native_calls == {}
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
        assert without_generate(snapshot(llama)) == before
        assert together([lambda row=row: ask(llama, row) for row in rows()[:4]]) == [row.tokens for row in rows()[:4]]
        assert engine.stats().finished == {hf_cb.FinishReason.LENGTH: 4}  # the counters start anew
        assert engine.stats().native_calls == {}
        hf_cb.uninstall(llama)
        assert snapshot(llama) == before
        assert "generate" not in vars(llama)
    assert ask(llama, rows()[0]) == rows()[0].tokens
