"""Models that cannot be packed are found out by the probe, and the reason says what is wrong with them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import models
import pytest
import seam
import torch
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM

import hf_cb
from hf_cb.attention import backend as attention_registry
from hf_cb.attention.step import LayerSpec

PROMPT = seam.prompts(6)[0][None]


class Mixing(nn.Module):
    """Adds some of the token before, as a convolution would: packed, that is a neighbour's."""

    def __init__(self, inner: nn.Module, share: float) -> None:
        super().__init__()
        self.inner, self.share = inner, share

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)
        return self.inner(hidden + self.share * before)


class Twice(LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        super().forward(*args, **kwargs)
        return super().forward(*args, **kwargs)


class Sometimes(LlamaAttention):
    """Attends to long inputs only."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.shape[1] < 4:
            return hidden_states, None
        return super().forward(hidden_states, *args, **kwargs)


class Apart(LlamaAttention):
    """Attention by its own means, as in models older than transformers' interface."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


class Biased(LlamaAttention):
    """Brings a mask of its own, as ALiBi models do."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        length = hidden_states.shape[1]
        kwargs["attention_mask"] = torch.zeros(1, 1, length, length)
        return super().forward(hidden_states, *args, **kwargs)


def of_class(attention: type[LlamaAttention], layers: slice, model: LlamaForCausalLM) -> None:
    for layer in model.model.layers[layers]:
        layer.self_attn.__class__ = attention


def mixing(share: float, model: LlamaForCausalLM) -> None:
    model.lm_head = Mixing(model.lm_head, share)


def looking_ahead(model: LlamaForCausalLM) -> None:
    model.model.layers[1].self_attn.is_causal = False


class NoPositions(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


def without_positions(model: LlamaForCausalLM) -> None:
    model.__class__ = NoPositions


class Unique(nn.Module):
    """Something that cannot be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        raise TypeError("there is only one")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def uncopyable(model: LlamaForCausalLM) -> None:
    model.lm_head = nn.Sequential(model.lm_head, Unique())


FAULTS: dict[str, tuple[str, Callable[[LlamaForCausalLM], None]]] = {
    "mixes rows": ("packed rows give other logits", functools.partial(mixing, 0.5)),
    "mixes rows a little": ("packed rows see their neighbours", functools.partial(mixing, 0.003)),
    "attends twice": ("attends more than once", functools.partial(of_class, Twice, slice(1, 2))),
    "attends sometimes": ("not called exactly once", functools.partial(of_class, Sometimes, slice(1, 2))),
    "attends apart": ("never call the registered attention function", functools.partial(of_class, Apart, slice(None))),
    "one layer attends apart": ("packed rows give other logits", functools.partial(of_class, Apart, slice(1, 2))),
    "brings a mask": ("adds a mask or bias", functools.partial(of_class, Biased, slice(0, 1))),
    "looks ahead": ("not causal", looking_ahead),
    "takes no positions": ("packed rows give other logits", without_positions),
    "is unique": ("there is only one", uncopyable),
}


@pytest.mark.parametrize(("reason", "spoil"), FAULTS.values(), ids=FAULTS)
def test_refused_with_the_reason(llama: LlamaForCausalLM, reason: str, spoil: Callable[[LlamaForCausalLM], None]) -> None:
    spoil(llama)
    want = type(llama).generate(llama, PROMPT, max_new_tokens=4)
    with hf_cb.continuous_batching(llama) as engine:
        assert reason in str(engine.unsupported_reason)
        assert torch.equal(llama.generate(PROMPT, max_new_tokens=4), want)
        assert engine.stats().native_calls == {engine.unsupported_reason: 1}
        assert engine.stats().attention_reason == engine.unsupported_reason
        assert engine.config is None
        assert engine.steps() == []
        with engine.pause():
            pass
        with pytest.raises(hf_cb.UnsupportedModelError, match=reason):
            engine.submit(PROMPT)


def test_refused_with_fallback_error(llama: LlamaForCausalLM) -> None:
    mixing(0.5, llama)
    with (
        hf_cb.continuous_batching(llama, fallback="error"),
        pytest.raises(hf_cb.UnsupportedCallError, match="packed rows give other logits"),
    ):
        llama.generate(PROMPT, max_new_tokens=4)


def test_a_faultless_model_passes(llama: LlamaForCausalLM) -> None:
    mixing(0.0, llama)
    with hf_cb.continuous_batching(llama) as engine:
        assert engine.unsupported_reason is None


def test_the_probe_leaves_the_random_state_alone(llama: LlamaForCausalLM) -> None:
    before = torch.get_rng_state()
    with hf_cb.continuous_batching(llama):
        assert torch.equal(torch.get_rng_state(), before)


def test_encoder_decoder() -> None:
    with hf_cb.continuous_batching(models.tiny("t5")) as engine:
        assert engine.unsupported_reason == "encoder-decoder model"


def encoder_only() -> PreTrainedModel:
    return BertModel(BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8))


@pytest.mark.parametrize("made", [lambda: nn.Linear(2, 2), lambda: "gpt2", lambda: None, encoder_only, lambda: PreTrainedModel])
def test_what_is_no_generative_model(made: Callable[[], Any]) -> None:
    thing = made()
    with pytest.raises(hf_cb.UnsupportedModelError, match=r"^model: takes a transformers model that can generate"):
        hf_cb.install(thing)
    for ask in (hf_cb.uninstall, hf_cb.get_engine):
        with pytest.raises(hf_cb.NotInstalledError):
            ask(thing)


# -- the attention backend ------------------------------------------------------------------------------------------------


class Refusing(attention_registry.AttentionBackend):
    """A backend that serves nothing."""

    name = "refusing"

    def why_not(self, spec: LayerSpec) -> str | None:
        return f"{spec.num_heads} heads are too many"

    def plan(self, *args: Any) -> None:
        raise AssertionError

    attend = plan


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention_registry._REGISTRY, "refusing", f"{__name__}:Refusing")


def test_an_unknown_attention_backend(llama: PreTrainedModel) -> None:
    with pytest.raises(hf_cb.InvalidArgumentError, match=r"^attention_backend: takes one of .*reference.*; got 'flashiest'$"):
        hf_cb.install(llama, attention_backend="flashiest")
    assert "generate" not in vars(llama)


@pytest.mark.usefixtures("refusing")
def test_a_named_attention_backend_that_cannot_serve_the_model(llama: PreTrainedModel) -> None:
    with pytest.raises(hf_cb.InvalidArgumentError, match=r"^attention_backend: .*4 heads are too many"):
        hf_cb.install(llama, attention_backend="refusing")
    assert "generate" not in vars(llama)


def test_no_attention_backend_serves_the_model(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_registry, "_REGISTRY", {"refusing": f"{__name__}:Refusing"})
    with hf_cb.continuous_batching(llama) as engine:
        assert "4 heads are too many" in str(engine.unsupported_reason)


def test_the_choice_is_told(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama, attention_backend="reference") as engine:
        assert engine.stats().attention_backend == "reference"
        assert engine.stats().attention_reason == "named in the configuration"


def test_memory_that_nobody_has(llama: PreTrainedModel) -> None:
    for options in ({"num_blocks": 1 << 50}, {"kv_cache_memory": 1 << 60}, {"num_blocks": 1 << 62}):
        with pytest.raises(hf_cb.InvalidArgumentError, match=r"^kv_cache_memory: .* bytes"):
            hf_cb.install(llama, **options)
        assert "generate" not in vars(llama)
    with pytest.raises(hf_cb.InvalidArgumentError, match=r"^kv_cache_memory: 100 bytes hold no block"):
        hf_cb.install(llama, kv_cache_memory=100)
    assert "generate" not in vars(llama)
