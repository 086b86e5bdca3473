"""torch.compile of the twin's layers: plain `generate()`'s tokens, a known number of compilations, and none where it fails."""

from __future__ import annotations

import shutil
from typing import Any

import crowd
import models
import pytest
import torch
from transformers import PreTrainedModel

import hf_cb
from hf_cb.hf.compiling import CompiledLayers, repeated_layers

# Compiling takes ten seconds and more, on a busy machine a minute.
pytestmark = pytest.mark.timeout(300)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")

NEW = 8
LENGTHS = (3, 17, 9, 26, 11)
MOST_GRAPHS = 4  # one token and any number, for each kind of layer


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, models.VOCAB, (1, n), generator=generator) for n in LENGTHS]


def plain(model: PreTrainedModel) -> list[list[int]]:
    return [type(model).generate(model, p, max_new_tokens=NEW)[0].tolist() for p in prompts()]


def ask(engine: hf_cb.Engine, model: PreTrainedModel, count: int) -> list[list[int]]:
    return crowd.answers(engine, [lambda p=p: model.generate(p, max_new_tokens=NEW)[0].tolist() for p in prompts()[:count]])


@pytest.fixture
def counters() -> Any:
    torch._dynamo.reset()
    counters: Any = torch._dynamo.utils.counters
    counters.clear()
    return counters


@needs_compiler
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_same_tokens_and_no_compilation_while_serving(name: str, counters: Any) -> None:
    model = models.tiny(name)
    with hf_cb.continuous_batching(model, compile=True) as engine:
        assert "3 layers" in engine.stats().compile_reason
        assert engine.stats().packed_bytes > 0
        compiled = counters["stats"]["unique_graphs"]
        assert 0 < compiled <= MOST_GRAPHS
        want = plain(model)
        for count in range(1, len(want) + 1):  # alone and in company, at every size of batch
            assert ask(engine, model, count) == want[:count]
        with torch.no_grad():
            for parameter in model.parameters():  # packed ones and the others: read where they are
                parameter.mul_(1.1)
        assert ask(engine, model, 2) == plain(model)[:2]
        assert counters["stats"]["unique_graphs"] == compiled
        assert engine.stats().native_calls == {}


def fails(*_: object, **__: object) -> Any:
    raise RuntimeError("no compiler today")


def test_a_compiler_that_fails(counters: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", fails)
    model = models.tiny("llama")
    with hf_cb.continuous_batching(model, compile=True) as engine:
        assert "no compiler today" in engine.stats().compile_reason
        assert engine.stats().packed_bytes > 0
        assert ask(engine, model, 3) == plain(model)[:3]
        assert engine.stats().native_calls == {}
    assert sum("torch.compile is not used" in record.message for record in caplog.records) == 1


@needs_compiler
def test_a_compiler_that_fails_later(counters: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The step is computed without; nobody's request suffers."""
    model = models.tiny("llama")
    with hf_cb.continuous_batching(model, compile=True) as engine:
        torch._dynamo.reset()  # so that it has to compile again
        monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", fails)
        assert ask(engine, model, 3) == plain(model)[:3]
        assert "no compiler today" in engine.stats().compile_reason
        assert engine.stats().native_calls == {}
    assert sum("torch.compile is not used" in record.message for record in caplog.records) == 1


def test_not_asked_for(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama) as engine:
        assert engine.stats().compile_reason == "not asked for"
    assert CompiledLayers().reason == "not asked for"


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "opt"])
def test_layers_are_found_by_structure(name: str) -> None:
    model = models.tiny(name)
    attention = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
    layers = repeated_layers(model, attention)
    assert len(layers) == 3
    assert all(type(layer).__name__.endswith(("Layer", "Block")) for layer in layers)
    assert repeated_layers(model, [model]) == []
