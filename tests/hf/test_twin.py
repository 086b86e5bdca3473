"""The twin: the user's weights, everything else its own; and it follows what the user does to the model."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import models
import pytest
import seam
import torch
from torch import nn
from transformers import PreTrainedModel

import hf_cb
from hf_cb import continuous
from hf_cb.hf.twins.fingerprint import Fingerprint
from hf_cb.hf.twins.twin import make_twin, set_attention

NEW = 8
PROMPT = seam.prompts(6)[0][None]


def plain(model: PreTrainedModel) -> torch.Tensor:
    """What the model as it is now generates by itself."""
    return type(model).generate(model, PROMPT, max_new_tokens=NEW)


def changes(model: PreTrainedModel, before: torch.Tensor) -> torch.Tensor:
    """Plain output, which must be another one than before."""
    after = plain(model)
    assert not torch.equal(after, before)
    return after


# -- what is shared -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2", "mixtral", "phi3+longrope"])
def test_weights_are_shared_and_nothing_else(name: str) -> None:
    model = models.tiny(name)
    twin = make_twin(model)
    for (key, theirs), (ours_key, ours) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert key == ours_key
        assert ours.data_ptr() == theirs.data_ptr()
    assert len({p.data_ptr() for m in (model, twin) for p in m.parameters()}) == len(list(model.parameters()))
    assert not {id(m) for m in model.modules()} & {id(m) for m in twin.modules()}
    assert twin.config is not model.config
    assert twin.generation_config is not model.generation_config
    assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]


def test_the_attention_setting_is_the_twins_alone(llama: PreTrainedModel) -> None:
    before = llama.config._attn_implementation
    twin = make_twin(llama)
    set_attention(twin, "hf_cb")
    assert {m.config._attn_implementation for m in twin.modules() if hasattr(m, "config")} == {"hf_cb"}
    assert {m.config._attn_implementation for m in llama.modules() if hasattr(m, "config")} == {before}


def test_tied_weights_stay_tied() -> None:
    model = models.tiny("gpt2")
    twin = make_twin(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert twin.lm_head.weight is twin.transformer.wte.weight


def test_a_model_in_training_mode_has_a_twin_that_is_not(llama: PreTrainedModel) -> None:
    llama.train()
    assert not make_twin(llama).training
    assert llama.training


# -- changes that the twin sees, or that make a new one -------------------------------------------------------------------


def replace_head(model: PreTrainedModel) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model.lm_head = nn.Linear(48, models.VOCAB, bias=False)


def replace_parameter(model: PreTrainedModel) -> None:
    layer = model.model.layers[1].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.detach().flip(0))


def own_forward(model: PreTrainedModel) -> None:
    norm = model.model.norm
    norm.forward = types.MethodType(lambda self, hidden: type(self).forward(self, hidden).flip(-1), norm)


def drop_a_layer(model: PreTrainedModel) -> None:
    del model.model.layers[2]


def lower_precision(model: PreTrainedModel) -> None:
    model.bfloat16()
    model.float()


def in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * torch.linspace(0.2, 1, weight.shape[-1])


def parametrize_both_ends(model: PreTrainedModel) -> None:
    for module in (model.model.embed_tokens, model.lm_head):
        nn.utils.parametrize.register_parametrization(module, "weight", Halved())


CHANGES = (parametrize_both_ends, replace_head, replace_parameter, own_forward, drop_a_layer, lower_precision, in_place)


@pytest.mark.parametrize("change", CHANGES)
def test_the_users_changes_count(llama: PreTrainedModel, change: Any) -> None:
    with hf_cb.continuous_batching(llama) as engine:
        before = llama.generate(PROMPT, max_new_tokens=NEW)
        assert torch.equal(before, plain(llama))
        change(llama)
        after = plain(llama) if change is lower_precision else changes(llama, before)
        assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), after)
        assert list(engine.submit(PROMPT, max_new_tokens=NEW).result().tokens) == after[0, 6:].tolist()
        assert engine.stats().native_calls == {}


def test_a_child_that_moves_on_counts(llama: PreTrainedModel) -> None:
    """Into a neighbour, and into the same list once more: the modules are the same, in much the same order."""
    llama.model.pre, llama.model.post = nn.Sequential(nn.Tanh()), nn.Sequential(nn.Identity(), nn.Identity())
    mark = Fingerprint.of(llama)
    child = llama.model.pre[0]
    del llama.model.pre[0]
    llama.model.post.append(child)
    assert not mark.matches(Fingerprint.of(llama))
    mark = Fingerprint.of(llama)
    llama.model.layers.append(llama.model.layers[0])
    assert not mark.matches(Fingerprint.of(llama))


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_runs_on_plain_calls_alone(llama: PreTrainedModel, kind: str) -> None:
    """Once for each forward pass of the call that it was meant for, on that call's thread, with its own tokens."""
    seen = []
    with hf_cb.continuous_batching(llama) as engine:
        want = llama.generate(PROMPT, max_new_tokens=NEW)
        handle = getattr(llama.model.layers[0], kind)(lambda module, args, *out: seen.append(args[0].shape[1]))
        assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), want)
        assert seen == [PROMPT.shape[1], *[1] * (NEW - 1)]
        assert ["hook" in reason for reason in engine.stats().native_calls] == [True]
        handle.remove()
        assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), want)
        assert sum(engine.stats().native_calls.values()) == 1


def test_submit_alone_follows_the_model_too(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama) as engine:
        before = plain(llama)
        assert list(engine.submit(PROMPT, max_new_tokens=NEW).result().tokens) == before[0, 6:].tolist()
        replace_head(llama)
        assert list(engine.submit(PROMPT, max_new_tokens=NEW).result().tokens) == changes(llama, before)[0, 6:].tolist()


def test_every_submit_looks_over_the_model_once(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with hf_cb.continuous_batching(llama) as engine:
        looks, look = [], Fingerprint.of
        monkeypatch.setattr(Fingerprint, "of", lambda *args: (looks.append(args), look(*args))[1])
        engine.submit(PROMPT, max_new_tokens=1).result()
        assert len(looks) == 1
        engine.submit_batch([PROMPT, PROMPT], max_new_tokens=1)[0].result()
        assert len(looks) == 2


def test_a_model_that_can_no_longer_be_served_runs_natively(llama: PreTrainedModel) -> None:
    class Echo(nn.Module):
        """Mixes each token with the one before it, across rows too."""

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + hidden.roll(1, dims=1)

    with hf_cb.continuous_batching(llama) as engine:
        llama.generate(PROMPT, max_new_tokens=NEW)
        norm = llama.model.norm
        llama.model.norm = Echo()
        after = plain(llama)
        assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), after)
        assert "packed rows" in str(engine.unsupported_reason)
        assert list(engine.stats().native_calls) == [engine.unsupported_reason]
        with pytest.raises(hf_cb.UnsupportedModelError, match="packed rows"):
            engine.submit(PROMPT, max_new_tokens=NEW)
        llama.model.norm = norm
        assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), plain(llama))
        assert engine.unsupported_reason is None
        assert sum(engine.stats().native_calls.values()) == 1


def test_fingerprints(llama: PreTrainedModel) -> None:
    first = Fingerprint.of(llama)
    assert first.matches(Fingerprint.of(llama))
    in_place(llama)
    assert first.matches(Fingerprint.of(llama))
    for change in CHANGES[:-2]:
        before = Fingerprint.of(llama)
        change(llama)
        assert not before.matches(Fingerprint.of(llama)), change.__name__


# -- copies ---------------------------------------------------------------------------------------------------------------


def by_pickle(model: PreTrainedModel) -> PreTrainedModel:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
def test_a_copy_of_an_installed_model_generates_plainly_with_its_own_weights(llama: PreTrainedModel, duplicate: Any) -> None:
    with hf_cb.continuous_batching(llama) as engine:
        want = llama.generate(PROMPT, max_new_tokens=NEW)
        other = duplicate(llama)
        with pytest.raises(hf_cb.NotInstalledError):
            hf_cb.get_engine(other)
        steps = engine.stats().steps
        assert torch.equal(other.generate(PROMPT, max_new_tokens=NEW), want)
        assert engine.stats().steps == steps
        in_place(other)
        changed = other.generate(PROMPT, max_new_tokens=NEW)
        assert not torch.equal(changed, want)
        assert torch.equal(changed, plain(other))
        assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), want)
    assert torch.equal(other.generate(PROMPT, max_new_tokens=NEW), changed)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
def test_a_copy_can_be_installed_itself(llama: PreTrainedModel, duplicate: Any) -> None:
    with hf_cb.continuous_batching(llama):
        other = duplicate(llama)
        with hf_cb.continuous_batching(other) as engine:
            assert torch.equal(other.generate(PROMPT, max_new_tokens=NEW), llama.generate(PROMPT, max_new_tokens=NEW))
            assert engine.stats().native_calls == {}
            assert torch.equal(duplicate(other).generate(PROMPT, max_new_tokens=NEW), plain(llama))
        assert torch.equal(other.generate(PROMPT, max_new_tokens=NEW), plain(llama))


def test_the_state_dict_and_saved_model_are_the_usual_ones(llama: PreTrainedModel, tmp_path: Any) -> None:
    keys = list(llama.state_dict())
    with hf_cb.continuous_batching(llama):
        assert list(llama.state_dict()) == keys
        llama.save_pretrained(tmp_path)
        loaded = type(llama).from_pretrained(tmp_path)
        assert torch.equal(loaded.generate(PROMPT, max_new_tokens=NEW), plain(llama))


# -- the end --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("uninstalled", [False, True])
def test_a_model_nobody_holds_is_collected(used: bool, uninstalled: bool) -> None:
    model = models.tiny("llama")
    engine = hf_cb.install(model)
    if used:
        model.generate(PROMPT, max_new_tokens=NEW)
    if uninstalled:
        hf_cb.uninstall(model)
    weight = weakref.ref(model.lm_head.weight)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    if used and not uninstalled:  # an engine that is still held goes on serving
        assert engine.submit(PROMPT, max_new_tokens=2).result().tokens
    del engine
    end = time.monotonic() + 5
    while weight() is not None and time.monotonic() < end:  # the engine's thread has its twin until it ends
        gc.collect()
        time.sleep(0.01)
    assert weight() is None


def test_an_engine_goes_on_without_its_model_before_anything_is_collected() -> None:
    gc.collect()
    gc.disable()
    try:
        model = models.tiny("llama")
        engine = hf_cb.install(model)
        assert engine is not None
        model.generate(PROMPT, max_new_tokens=NEW)
        del model
        assert engine.submit(PROMPT, max_new_tokens=2).result().tokens
    finally:
        gc.enable()
    engine.shutdown()


def test_vars_are_what_they_were(llama: PreTrainedModel) -> None:
    before = {name: id(value) for name, value in vars(llama).items()}
    for _ in range(3):
        hf_cb.install(llama)
        assert {name for name in vars(llama) if name not in before} == {"generate"}
        llama.generate(PROMPT, max_new_tokens=2)
        hf_cb.uninstall(llama)
        assert {name: id(value) for name, value in vars(llama).items()} == before


# -- switches inside of modules --------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A linear layer with a low-rank addition that is switched and scaled by plain attributes, as adapter libraries do."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.disabled, self.scaling, self.merged = base, False, {"default": 4.0}, []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.disabled or self.merged:
            return self.base(x)
        return self.base(x) + self.up(self.down(x)) * self.scaling["default"]


def switch_off(layer: Adapted) -> None:
    layer.disabled = True


def scale(layer: Adapted) -> None:
    layer.scaling["default"] = -9.0


def merge(layer: Adapted) -> None:
    layer.base.weight.data += 20 * layer.up.weight.data @ layer.down.weight.data
    layer.merged.append("default")


@pytest.mark.parametrize("change", [switch_off, scale, merge])
def test_an_adapter_that_is_switched(llama: PreTrainedModel, change: Any) -> None:
    attention = llama.model.layers[1].self_attn
    attention.q_proj = Adapted(attention.q_proj).eval()
    with hf_cb.continuous_batching(llama) as engine:
        before = plain(llama)
        assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), before)
        change(attention.q_proj)
        after = changes(llama, before)
        assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), after)
        assert engine.stats().native_calls == {}


def test_dropout_that_is_on_by_itself_runs_natively(llama: PreTrainedModel) -> None:
    llama.model.norm = nn.Sequential(llama.model.norm, nn.Dropout(0.5)).eval()
    with hf_cb.continuous_batching(llama) as engine:
        assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), plain(llama))
        llama.model.norm[1].train()
        llama.generate(PROMPT, max_new_tokens=NEW)
        assert list(engine.stats().native_calls) == ["a dropout layer is in training mode"]


def test_a_shallow_copy_has_no_backend_of_its_own(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama):
        other = copy.copy(llama)
        with pytest.raises(hf_cb.NotInstalledError):
            hf_cb.uninstall(other)
        assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), plain(llama))


def test_the_users_storage_can_still_be_resized(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama):
        llama.generate(PROMPT, max_new_tokens=NEW)
    llama.lm_head.weight.untyped_storage().resize_(0)


def test_a_model_that_is_changed_back_while_its_twin_is_made(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another caller, who comes then, finds the model as it was for the old twin; that one is about to go."""
    first, second = llama.model.layers[1].mlp, copy.deepcopy(llama.model.layers[0].mlp)
    begun, may_end = threading.Event(), threading.Event()
    make = continuous.build

    def slow(*args: Any) -> Any:
        served = make(*args)
        begun.set()
        assert may_end.wait(20)
        return served

    with hf_cb.continuous_batching(llama), ThreadPoolExecutor(2) as pool:
        want = llama.generate(PROMPT, max_new_tokens=NEW)
        monkeypatch.setattr(continuous, "build", slow)
        llama.model.layers[1].mlp = second
        pool.submit(llama.generate, PROMPT, max_new_tokens=NEW)
        assert begun.wait(20)
        llama.model.layers[1].mlp = first
        late = pool.submit(llama.generate, PROMPT, max_new_tokens=NEW)
        time.sleep(0.2)  # it waits, or is wrong
        may_end.set()
        assert torch.equal(late.result(20), want)


def test_a_weight_of_another_shape_and_values_of_torchs_own_layers_count(llama: PreTrainedModel) -> None:
    mark = Fingerprint.of(llama)
    llama.model.layers[1].mlp.down_proj.weight.data = torch.zeros(48, 32)
    assert not mark.matches(Fingerprint.of(llama))
    gpt2 = models.tiny("gpt2")
    mark = Fingerprint.of(gpt2)
    gpt2.transformer.ln_f.eps = 1.0
    assert not mark.matches(Fingerprint.of(gpt2))
    llama.model.flags = list(range(32))
    mark = Fingerprint.of(llama)
    llama.model.flags[31] = 0
    assert not mark.matches(Fingerprint.of(llama))
    llama.model.layers[0].mlp = llama.model.layers[2].mlp
    mark = Fingerprint.of(llama)
    llama.model.layers[0].mlp = llama.model.layers[1].mlp
    assert not mark.matches(Fingerprint.of(llama))
