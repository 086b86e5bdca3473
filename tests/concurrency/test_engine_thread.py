"""Calls from the engine's own thread would wait for themselves: they are refused, and the engine goes on."""

from __future__ import annotations

import pytest
import torch
from serving import SMALL, Gate, ask, doors, plain, rows, submit
from torch import nn
from transformers import PreTrainedModel

import hf_cb
from hf_cb import Engine, RequestFailedError, UnsupportedCallError

pytestmark = pytest.mark.timeout(20)


def test_every_call_that_would_wait(llama: PreTrainedModel, engine: Engine, gate: Gate) -> None:
    row, refusals = rows()[6], []
    handle = submit(engine, row)
    gate.arrival()

    def call_back() -> None:
        for call in doors(llama, engine):
            with pytest.raises(UnsupportedCallError) as refusal:
                call()
            refusals.append(str(refusal.value))

    gate.act(call_back)
    assert handle.result().tokens == row.tokens
    assert len(refusals) == 4
    assert all("engine's own thread" in refusal for refusal in refusals)
    assert ask(llama, row) == row.tokens


def test_a_module_that_generates(llama: PreTrainedModel) -> None:
    """One that calls the engine from the twin's forward: that step fails, with the reason, and no other."""
    row = rows()[6]
    armed = []

    class Generating(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if armed:
                armed.pop()
                llama.generate(row.ids, max_new_tokens=2)
            return super().forward(input)

    llama.lm_head.__class__ = Generating
    with hf_cb.continuous_batching(llama, **SMALL):
        armed.append(True)
        with pytest.raises(RequestFailedError, match="engine's own thread") as caught:
            ask(llama, row)
        assert isinstance(caught.value.__cause__, UnsupportedCallError)
        assert ask(llama, row) == row.tokens


def test_a_rebuilding(llama: PreTrainedModel, engine: Engine, gate: Gate) -> None:
    row = rows()[6]
    handle = submit(engine, row)
    gate.arrival()
    llama.lm_head = nn.Linear(llama.lm_head.in_features, llama.lm_head.out_features, bias=False)

    def call_back() -> None:
        with pytest.raises(UnsupportedCallError, match="engine's own thread"):
            ask(llama, row)

    gate.act(call_back)
    assert handle.result().tokens == row.tokens
    assert ask(llama, row) == plain(llama, row.prompt, len(row.tokens))


def test_shutdown(engine: Engine, gate: Gate) -> None:
    handle = submit(engine, rows()[6])
    gate.arrival()
    gate.act(engine.shutdown)
    assert handle.result().tokens == rows()[6].tokens
    with pytest.raises(hf_cb.EngineClosedError):
        submit(engine, rows()[6])
