"""What a module holds that is no parameter, buffer, submodule or plain value: exchanged or written to, it is followed."""

from __future__ import annotations

import dataclasses
import enum
import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import models
import numpy as np
import pytest
import seam
import torch
from torch import nn
from transformers import PreTrainedModel

import hf_cb
from hf_cb import continuous
from hf_cb.hf.calls.result_cache import NAME
from hf_cb.hf.twins.fingerprint import Fingerprint

NEW = 8
PROMPT, OTHER = (row[None] for row in seam.prompts(6, 9))


@dataclasses.dataclass
class Settings:
    shift: Any = 0.0
    calls: int = 0


class Slotted:
    __slots__ = ("shift",)

    def __init__(self, shift: float) -> None:
        self.shift = shift


def scaled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return x * by


class Steered(nn.Module):
    """An MLP that adds what it holds, in all the ways in which libraries for steering hold it, and keeps books."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.vector, self.mix = inner, vector(0.5), torch.add
        self.settings, self.slotted, self.nested = Settings(), Slotted(0.1), {"layers": [Settings(0.2), {"by": vector(0.1)}]}
        self.scale, self.hidden = functools.partial(scaled, by=vector(1.0)), [nn.Linear(48, 48, bias=False)]
        nn.init.constant_(self.hidden[0].weight, 0.01)
        self.calls, self.seen, self.output = 0, [], None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.settings.calls += 1
        self.seen.append(x.shape[1])
        nested = self.nested["layers"]
        y = self.mix(self.inner(x), self.vector) + self.settings.shift + self.slotted.shift
        self.output = self.scale(y + nested[0].shift + nested[1]["by"] + self.hidden[0](x))
        return self.output


def vector(value: float) -> torch.Tensor:
    """Of another direction for each value."""
    return torch.randn(48, generator=torch.Generator().manual_seed(int(abs(value) * 10))) * value


def an_attribute(s: Steered) -> None:
    s.vector = vector(-3.0)


def written_in_place(s: Steered) -> None:
    s.vector.mul_(-4)


def an_object(s: Steered) -> None:
    s.settings = Settings(vector(4.0))


def a_field(s: Steered) -> None:
    s.settings.shift = vector(-5.0)


def a_slot(s: Steered) -> None:
    s.slotted.shift = vector(6.0)


def deep_down(s: Steered) -> None:
    s.nested["layers"][1]["by"] = vector(-7.0)


def a_field_deep_down(s: Steered) -> None:
    s.nested["layers"][0].shift = vector(8.0)


def a_function(s: Steered) -> None:
    s.mix = torch.sub


def in_a_partial(s: Steered) -> None:
    s.scale.keywords["by"].mul_(-1)


def a_hidden_module(s: Steered) -> None:
    with torch.no_grad():
        s.hidden[0].weight.copy_(torch.eye(48) * 5)


def made_by_autograd(s: Steered) -> None:
    s.vector = nn.Parameter(vector(1.0)).exp() - 2


CHANGES = (
    *(an_attribute, written_in_place, an_object, a_field, a_slot, deep_down, a_field_deep_down),
    *(a_function, in_a_partial, a_hidden_module, made_by_autograd),
)


def plain(model: PreTrainedModel, prompt: torch.Tensor = PROMPT, **options: Any) -> torch.Tensor:
    return types.MethodType(type(model).generate, model)(prompt, **{"max_new_tokens": NEW, **options})


def steered(model: PreTrainedModel) -> Steered:
    model.model.layers[1].mlp = made = Steered(model.model.layers[1].mlp)
    return made


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each twin that is made."""
    made: list[None] = []
    make = continuous.build
    monkeypatch.setattr(continuous, "build", lambda *args: (made.append(None), make(*args))[1])
    return made


def test_what_is_changed_is_followed(llama: PreTrainedModel, builds: list[None]) -> None:
    """Each change makes one new twin. What the modules write as they run makes none: their books are seen in the probe."""
    held = steered(llama)
    with hf_cb.continuous_batching(llama, fallback="error") as engine:
        for i, change in enumerate(CHANGES):
            before = plain(llama)
            assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), before)
            other = engine.submit(OTHER, max_new_tokens=40)
            change(held)
            want = plain(llama)
            assert not torch.equal(want, before), change.__name__
            for _ in range(2):
                assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), want), change.__name__
            assert len(builds) == i + 2, change.__name__
            assert len(other.result().tokens) == 40


def test_the_config_is_followed(llama: PreTrainedModel) -> None:
    class Shifted(nn.Module):
        def __init__(self, inner: nn.Module, config: Any) -> None:
            super().__init__()
            self.inner, self.config = inner, config

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.config.strength

    llama.config.strength = 1.0
    llama.model.layers[1].mlp = Shifted(llama.model.layers[1].mlp, llama.config)
    with hf_cb.continuous_batching(llama, fallback="error"):
        before = llama.generate(PROMPT, max_new_tokens=NEW)
        llama.config.strength = -2.0
        want = plain(llama)
        assert not torch.equal(want, before)
        assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), want)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True, "top_k": 3}])
def test_plain_generate_changes_nothing_that_counts(llama: PreTrainedModel, options: dict[str, Any]) -> None:
    mark = Fingerprint.of(llama)
    during: list[bool] = []
    watch = llama.model.norm.register_forward_pre_hook(lambda *_: during.append(mark.values == Fingerprint.of(llama).values))
    plain(llama, **options)
    watch.remove()
    assert during
    assert all(during)
    assert mark.matches(Fingerprint.of(llama))


def test_what_the_engine_itself_writes_to_is_no_twin_for_each_call(llama: PreTrainedModel, builds: list[None]) -> None:
    """A forward that counts, by what it closes over, in another module: that of the user's model, in a run of the twin too."""
    counter, inner = llama.model.layers[2].mlp, llama.model.layers[0].mlp.forward
    counter.calls = 0

    def forward(x: torch.Tensor) -> torch.Tensor:
        counter.calls += 1
        return inner(x)

    llama.model.layers[0].mlp.forward = forward
    with hf_cb.continuous_batching(llama) as engine:
        for _ in range(3):
            assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), plain(llama))
        assert len(builds) == 2
        assert ["changes while" in reason for reason in engine.stats().native_calls] == [True]


def test_what_a_native_call_leaves_behind_counts_for_nothing(llama: PreTrainedModel, builds: list[None]) -> None:
    """transformers' hooks for attentions and hidden states stay in the model that was asked for them once."""
    with hf_cb.continuous_batching(llama) as engine:
        before = llama.generate(PROMPT, max_new_tokens=NEW, return_dict_in_generate=True)
        llama.generate(PROMPT, max_new_tokens=1, return_dict_in_generate=True, output_hidden_states=True)
        assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), plain(llama))
        assert len(engine.stats().native_calls) == len(builds) == 1
        want = plain(llama, return_dict_in_generate=True)[NAME]
        torch.testing.assert_close(before[NAME].layers[0].keys, want.layers[0].keys)


def test_the_look_runs_no_code_of_the_users(llama: PreTrainedModel) -> None:
    def refuse(*_: object) -> Any:
        raise AssertionError("called")

    sequence, proxy, switch = (
        type("Sequence", (list,), {"__iter__": refuse, "__len__": refuse})(),
        type("Proxy", (), {"__class__": property(refuse)})(),
        enum.Enum("Switch", "ON OFF"),
    )
    switch.__eq__ = refuse  # type: ignore[method-assign, assignment]
    vars(llama.model)["things"] = things = [sequence, proxy, switch.ON, {switch.ON: switch.ON}]
    mark = Fingerprint.of(llama)
    assert mark.matches(Fingerprint.of(llama))
    things[2] = switch.OFF
    assert not mark.matches(Fingerprint.of(llama))


@pytest.mark.parametrize(
    "many",
    [
        pytest.param(lambda: [Settings(i) for i in range(20_001)], id="objects"),
        pytest.param(lambda: [(i,) for i in range(20_001)], id="plain"),
        pytest.param(lambda: list(range(500_000)), id="items"),
        pytest.param(lambda: np.zeros(300_000_000, np.int8), id="bytes"),
    ],
)
def test_more_than_can_be_looked_at_runs_natively(llama: PreTrainedModel, many: Callable[[], Any]) -> None:
    llama.model.many = many()
    with hf_cb.continuous_batching(llama) as engine:
        assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), plain(llama))
        assert ["more than" in reason for reason in engine.stats().native_calls] == [True]


def test_a_fingerprint_keeps_nothing_alive(llama: PreTrainedModel) -> None:
    held = steered(llama)
    held.by_module = {held: Settings()}
    mark = Fingerprint.of(llama)
    gone = [weakref.ref(thing) for thing in (held, held.vector, held.settings, held.hidden[0])]
    llama.model.layers[1].mlp = held.inner
    del held
    gc.collect()
    assert [thing() for thing in gone] == [None] * 4
    assert not mark.matches(Fingerprint.of(llama))


# -- code of one's own -----------------------------------------------------------------------------------------------------


def test_keys_of_a_forward_that_reads_what_is_outside_are_not_kept(llama: PreTrainedModel) -> None:
    strength = {"now": 0.0}
    long = seam.prompts(40)[0][None]
    mlp = llama.model.layers[0].mlp
    own: Callable[..., torch.Tensor] = mlp.forward
    mlp.forward = lambda x: own(x) + strength["now"] * vector(3.0)
    with hf_cb.continuous_batching(llama, fallback="error") as engine:
        for strength["now"] in (0.0, 1.0, -1.0, 0.0):
            assert torch.equal(llama.generate(long, max_new_tokens=NEW), plain(llama, long))
        assert engine.stats().cached_tokens == 0
        assert "model.layers.0.mlp" in engine.stats().prefix_reason
        assert engine.config is not None
        assert not engine.config.prefix_cache
        del mlp.forward
        for _ in range(2):
            assert torch.equal(llama.generate(long, max_new_tokens=NEW), plain(llama, long))
        assert engine.stats().cached_tokens > 0
        assert engine.stats().prefix_reason == "on"


def test_own_code_can_be_vouched_for(llama: PreTrainedModel) -> None:
    steered(llama)
    long = seam.prompts(40)[0][None]
    with hf_cb.continuous_batching(llama, prefix_cache="always", fallback="error") as engine:
        for _ in range(2):
            assert torch.equal(llama.generate(long, max_new_tokens=NEW), plain(llama, long))
        assert engine.stats().cached_tokens > 0


# -- weights that keep no version --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", [True, False])
def test_weights_that_are_inference_tensors(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All numbers of one are negated but for the samples that are taken of other weights."""
    if not kernels:
        monkeypatch.setattr("hf_cb.hf.twins.weights.is_loaded", lambda: False)
    long = seam.prompts(40)[0][None]
    with torch.inference_mode():
        model = models.tiny("llama")
    assert model.lm_head.weight.is_inference()
    with hf_cb.continuous_batching(model, fallback="error") as engine:
        for _ in range(2):
            before = model.generate(long, max_new_tokens=NEW)
            assert torch.equal(before, plain(model, long))
        assert engine.stats().cached_tokens > 0
        with torch.inference_mode():
            flat = model.model.layers[1].mlp.down_proj.weight.view(-1)
            samples = flat[:: len(flat) // 8 - 1]
            kept = samples.clone()
            flat.neg_()
            samples.copy_(kept)
        want = plain(model, long)
        assert not torch.equal(want, before)
        assert torch.equal(model.generate(long, max_new_tokens=NEW), want)
