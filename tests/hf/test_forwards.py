"""Models whose forward was put in the place of their class's: compiled, wrapped, under autocast."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import seam
import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

import hf_cb
from hf_cb.hf.twins.twin import make_twin

pytestmark = pytest.mark.timeout(30)

NEW = 8
PROMPT = seam.prompts(6)[0][None]

compiled: Callable[[Any], Any] = functools.partial(torch.compile, backend="eager")


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """torch.compile wraps as ever, and then compiles nothing."""
    with torch.compiler.set_stance("force_eager"):
        yield


def plain(model: PreTrainedModel) -> torch.Tensor:
    return type(model).generate(model, PROMPT, max_new_tokens=NEW)


def compile_model(model: PreTrainedModel) -> None:
    model.forward = compiled(model.forward)


def compile_layers(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.forward = compiled(layer.forward)


def compile_modules(model: PreTrainedModel) -> None:
    model.model.layers[1] = compiled(model.model.layers[1])
    model.lm_head.forward = compiled(compiled(model.lm_head.forward))


@pytest.mark.parametrize("change", [compile_model, compile_layers, compile_modules])
def test_compiled_forwards(llama: PreTrainedModel, change: Callable[[PreTrainedModel], None]) -> None:
    """The twin runs what they were compiled from: its own modules, which attend by the engine."""
    change(llama)
    with hf_cb.continuous_batching(llama) as engine:
        assert engine.unsupported_reason is None
        assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), plain(llama))
        before = plain(llama)
        with torch.no_grad():
            llama.lm_head.weight.copy_(llama.lm_head.weight.flip(0))
        assert not torch.equal(plain(llama), before)
        assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), plain(llama))
        assert engine.stats().native_calls == {}


def test_a_compiled_forward_is_the_classs_in_the_twin(llama: PreTrainedModel) -> None:
    compile_model(llama)
    assert "forward" not in vars(make_twin(llama))
    other = llama.model.layers[0]
    llama.model.layers[1].forward = compiled(other.forward)  # of another module
    twin = make_twin(llama)
    assert twin.model.layers[1].forward == types.MethodType(type(other).forward, twin.model.layers[0])


def test_a_compiled_model(llama: PreTrainedModel) -> None:
    model = compiled(llama)
    engine = hf_cb.install(model)
    assert hf_cb.get_engine(model) is hf_cb.get_engine(llama) is engine
    with pytest.raises(hf_cb.AlreadyInstalledError):
        hf_cb.install(llama)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=NEW), plain(llama))
    assert engine.stats().output_tokens == NEW
    hf_cb.uninstall(model)
    assert "generate" not in vars(llama)


def wrap_model(model: PreTrainedModel) -> None:
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)


def wrap_as_a_method(model: PreTrainedModel) -> None:
    inner = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: Any, fused: bool = False, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    model.forward = types.MethodType(forward, model)


def wrap_under_autocast(model: PreTrainedModel) -> None:
    """As TRL does it first, and then accelerate."""
    wrap_as_a_method(model)
    Accelerator(mixed_precision="bf16", cpu=True).prepare(model).eval()


def wrap_by_a_global(model: PreTrainedModel) -> None:
    """As a script does it."""
    exec("inner = model.forward\nmodel.forward = lambda *args, **kwargs: inner(*args, **kwargs)", {"model": model})


def wrap_a_layer(model: PreTrainedModel) -> None:
    layer = model.model.layers[1]
    inner = layer.forward
    layer.forward = lambda *args, **kwargs: inner(*args, **kwargs)


@pytest.mark.parametrize("wrap", [wrap_model, wrap_as_a_method, wrap_under_autocast, wrap_by_a_global, wrap_a_layer])
def test_a_forward_that_calls_the_users_own_modules(llama: PreTrainedModel, wrap: Callable[[Any], None]) -> None:
    name = "model.layers.1" if wrap is wrap_a_layer else "the model"
    with hf_cb.continuous_batching(llama) as engine:
        llama.generate(PROMPT, max_new_tokens=NEW)
        wrap(llama)
        assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), plain(llama))
        ((reason, count),) = engine.stats().native_calls.items()
        assert reason.startswith(f"the forward of {name} is a function round the user's own modules")
        assert count == 1


def test_mixed_precision(llama: PreTrainedModel) -> None:
    """As accelerate prepares a model, and unwraps it again."""
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare(llama).eval()
    with hf_cb.continuous_batching(llama) as engine:
        assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), plain(llama))
        ((reason, _),) = engine.stats().native_calls.items()
        assert "autocast (mixed precision" in reason
        accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), plain(llama))
        assert engine.stats().output_tokens == NEW
