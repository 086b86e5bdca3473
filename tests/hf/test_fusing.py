"""Fused forwards: which modules get one, that those which compute something else keep their own, and what they follow."""

from __future__ import annotations

import itertools
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import crowd
import inside
import models
import pytest
import seam
import torch
from seam import NEW, PROMPT
from torch import nn
from torch.nn import functional
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
)
from transformers.models.llama.modeling_llama import eager_attention_forward as eager

import hf_cb
from hf_cb.hf.fast import candidates, fusing
from hf_cb.hf.fast.fused_forwards import Attention, FusedLayer, GatedMLP, Norm, Stack
from hf_cb.hf.fast.packing import Pack
from hf_cb.hf.fast.products import OwnProducts, kernels_panel
from hf_cb.hf.fast.stacking import Succession
from hf_cb.hf.support import Wishes, examine

ROOM = 1 << 30
ROWS = seam.prompts(9, 1, 17, 33, 5, 2)
WHOLE = {"Norm": 7, "Attention": 3, "GatedMLP": 3, "FusedLayer": 3, "Stack": 1}  # two norms in a layer, and a last one
APART = {kind: count for kind, count in WHOLE.items() if kind != "Stack"}  # layers of several forms
NO_LAYER = {**APART, "FusedLayer": 2}
NO_MLP, NO_ATTENTION, NO_NORM = ({**NO_LAYER, kind: WHOLE[kind] - 1} for kind in ("GatedMLP", "Attention", "Norm"))

pytestmark = pytest.mark.skipif(not kernels_panel(), reason="the compiled kernels need a compiler and vector instructions")


def examined(model: nn.Module, pack_memory: int = ROOM) -> Any:
    return examine(model, Wishes(pack_memory=pack_memory))


def stacks(model: nn.Module) -> list[Stack]:
    forwards = [vars(module).get("forward") for module in examined(model).twin.modules()]
    return [forward for forward in forwards if isinstance(forward, Stack)]


def fused(model: nn.Module, pack_memory: int = ROOM) -> dict[str, int]:
    """How many modules of a twin of `model` have a fused forward, by kinds."""
    forwards = [vars(module).get("forward") for module in examined(model, pack_memory).twin.modules()]
    forwards += [layer for stack in forwards if isinstance(stack, Stack) for layer in stack.layers]
    return dict(Counter(type(f).__name__ for f in forwards if isinstance(f, Norm | Attention | GatedMLP | FusedLayer | Stack)))


def in_company(model: Any, engine: hf_cb.Engine, **options: Any) -> list[hf_cb.Result]:
    with crowd.held(engine, len(ROWS)):
        handles = [engine.submit(row, max_new_tokens=NEW, **options) for row in ROWS]
    return [handle.result() for handle in handles]


# -- what is fused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        *((name, WHOLE) for name in ("llama", "qwen2", "gemma", "phi3", "mistral")),
        ("granite", {"Norm": 7, "Attention": 3, "GatedMLP": 3}),  # its layers scale what they add
        ("qwen3", {"Norm": 13, "GatedMLP": 3}),  # norms between its queries and their turns
        ("smollm3", NO_ATTENTION),  # one without rotary positions between the others
        ("olmo2", {"Norm": 13, "GatedMLP": 3}),  # norms behind attention and MLP
        ("cohere", {}),  # its norms subtract the mean
        ("gpt2", {}),
    ],
)
def test_what_is_fused(name: str, kinds: dict[str, int]) -> None:
    assert fused(models.tiny(name)) == kinds
    if name in ("llama", "gemma", "phi3"):
        for dtype in (torch.bfloat16, torch.float16):
            assert fused(models.tiny(name).to(dtype)) == kinds


@pytest.mark.parametrize("name", ["llama", "gemma", "phi3", "granite", "qwen3"])
def test_same_tokens_alone_and_in_company(name: str) -> None:
    with seam.duo(name) as pair:
        alone = [pair.same(row[None], max_new_tokens=NEW)[0, len(row) :].tolist() for row in ROWS[:2]]
        together = [list(result.tokens) for result in in_company(pair.served, pair.engine)]
        assert together[:2] == alone
        assert together[2:] == [pair.plain.generate(row[None], max_new_tokens=NEW)[0, len(row) :].tolist() for row in ROWS[2:]]


@pytest.mark.parametrize("name", ["llama", "gemma", "qwen2"])
def test_half_precision_has_the_same_bits_in_any_company(name: str) -> None:
    model = models.tiny(name).to(torch.bfloat16)
    options = {"logprobs": 5, "prompt_logprobs": 5}
    with hf_cb.continuous_batching(model) as engine:
        together = in_company(model, engine, **options)
        alone = [engine.submit(row, max_new_tokens=NEW, **options).result() for row in ROWS]
    if torch.cpu._is_amx_tile_supported():  # whose kernels sum in another order for many rows
        together, alone = together[:1], together[:1]
    for one, other in zip(together, alone, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == other.logprobs
        assert one.prompt_logprobs == other.prompt_logprobs


@pytest.mark.parametrize("name", ["llama", "gemma", "phi3"])
def test_half_precision_is_as_near_to_the_truth_as_plain(name: str) -> None:
    model = models.tiny(name).to(torch.bfloat16)
    truth = models.tiny(name).to(torch.bfloat16).float()  # the same weights
    with hf_cb.continuous_batching(model) as engine:
        got = engine.submit(ROWS[3], max_new_tokens=1, prompt_logprobs=0).result().prompt_logprobs
    assert got is not None
    with torch.no_grad():
        want, plain = (
            m(ROWS[3][None]).logits[0, :-1].float().log_softmax(-1).gather(-1, ROWS[3][1:, None])[:, 0]
            for m in (truth, model)  # called, not generating: as without the engine
        )
    served = torch.tensor([place.logprob for place in got[1:] if place is not None])
    assert (served - want).abs().mean() < 1.5 * (plain - want).abs().mean() + 1e-3


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_room_for_some_weights_only(share: float) -> None:
    whole = examined(models.tiny("llama")).packs.num_bytes
    kinds = fused(models.tiny("llama"), pack_memory=int(share * whole))
    assert kinds["Norm"] == 7
    assert kinds.get("GatedMLP", 0) < 3
    with seam.duo("llama", {"pack_memory": int(share * whole)}) as pair:
        pair.same(**seam.left_padded(ROWS), max_new_tokens=NEW)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernels_activations_are_those_that_modules_are_tried_with(dtype: torch.dtype) -> None:
    size = 2 * kernels_panel()
    product = OwnProducts().pack(torch.eye(2 * size, dtype=dtype), None)
    top = 200.0 if dtype == torch.float16 else 1e6
    gate = torch.cat([torch.linspace(-end, end, 10 * size) for end in (12.0, 200.0, top)]).to(dtype).view(-1, size)
    up = torch.randn(gate.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for number, function in candidates._ACTIVATIONS.items():
        want = function(gate) * up
        for swapped in (False, True):
            got = product.gated(torch.cat([up, gate] if swapped else [gate, up], -1), number, swapped)
            torch.testing.assert_close(got, want, rtol=3e-6 if dtype == torch.float32 else 1e-2, atol=1e-5)


# -- look-alikes -------------------------------------------------------------------------------------------------------------


def like(kind: type[nn.Module], **methods: Callable[..., Any]) -> type[nn.Module]:
    """The kind with methods of its own."""
    return type(f"Own{kind.__name__}", (kind,), methods)


def halved(forward: Callable[..., Any]) -> Callable[..., Any]:
    def half(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        return (0.5 * out[0], *out[1:]) if isinstance(out, tuple) else 0.5 * out

    return half


class OwnAttention(LlamaAttention):
    """LlamaAttention with its steps one by one."""

    def queries(self, q: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return q

    def turn(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return apply_rotary_pos_emb(q, k, cos, sin)

    def output(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (proj(hidden_states).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.turn(self.queries(q, position_ids), k, *position_embeddings)
        if (cache := kwargs.get("cache")) is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        out, weights = attend(self, q, k, v, kwargs.get("attention_mask"), dropout=0.0, scaling=self.scaling)
        return self.o_proj(self.output(out.reshape(*hidden_states.shape[:-1], -1))), weights


class OwnLayer(LlamaDecoderLayer):
    """LlamaDecoderLayer with another way to add up."""

    def add(self, x: torch.Tensor, y: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return x + y

    def forward(self, hidden_states: torch.Tensor, *, position_ids: Any = None, **kwargs: Any) -> torch.Tensor:
        x = hidden_states
        y, _ = self.self_attn(hidden_states=self.input_layernorm(x), position_ids=position_ids, **kwargs)
        x = self.add(x, y, position_ids)
        return self.add(x, self.mlp(self.post_attention_layernorm(x)), position_ids)


def interleaved(self: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    order = torch.arange(self.head_dim).view(2, -1).t().reshape(-1)
    return apply_rotary_pos_emb(q[..., order], k[..., order], cos, sin)


def louder_between(self: Any, x: torch.Tensor, y: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """At positions between those that a probe has and those that are far away."""
    return x + y * (1.0 + ((positions >= 200) & (positions < 20000))[..., None])


UP_FIRST = like(LlamaMLP, forward=lambda self, x: self.down_proj(self.up_proj(x) * functional.silu(self.gate_proj(x))))
LOOK_ALIKES: dict[str, tuple[str, dict[str, int], type[nn.Module]]] = {
    "clamped MLP": (
        "mlp",
        NO_MLP,
        like(
            LlamaMLP,
            forward=lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7)) * self.up_proj(x)),
        ),
    ),
    "rarely clamped MLP": (
        "mlp",
        NO_MLP,
        like(
            LlamaMLP,
            forward=lambda self, x: self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(-1e5, 1e5)),
        ),
    ),
    "louder MLP": ("mlp", NO_MLP, like(LlamaMLP, forward=lambda self, x: LlamaMLP.forward(self, 1.5 * x))),
    "cut MLP": ("mlp", NO_MLP, like(LlamaMLP, forward=lambda self, x: LlamaMLP.forward(self, x).clamp(-2, 2))),
    "MLP in another order": ("mlp", APART, UP_FIRST),
    "shifted norm": (
        "input_layernorm",
        NO_NORM,
        like(LlamaRMSNorm, forward=lambda self, x: LlamaRMSNorm.forward(self, x) + 0.1),
    ),
    "cut norm": (  # seen only where one number of a row stands out
        "post_attention_layernorm",
        NO_NORM,
        like(LlamaRMSNorm, forward=lambda self, x: LlamaRMSNorm.forward(self, x).clamp(-5, 5)),
    ),
    "mean norm": (
        "input_layernorm",
        NO_NORM,
        like(LlamaRMSNorm, forward=lambda self, x: LlamaRMSNorm.forward(self, x - x.mean(-1, keepdim=True))),
    ),
    "attention": ("self_attn", WHOLE, OwnAttention),
    "clamped attention": ("self_attn", NO_ATTENTION, like(OwnAttention, queries=lambda self, q, _: q.clamp(-8, 8))),
    "far attention": (  # louder from a thousand tokens on, farther than any probe
        "self_attn",
        NO_ATTENTION,
        like(OwnAttention, queries=lambda self, q, positions: q * (1 + (positions // 1000 + 1).log()[:, None, :, None])),
    ),
    "interleaved attention": ("self_attn", NO_ATTENTION, like(OwnAttention, turn=interleaved)),
    "quiet attention": ("self_attn", NO_ATTENTION, like(OwnAttention, output=lambda self, x: 0.5 * x)),
    "layer": ("", WHOLE, OwnLayer),
    "quiet layer": ("", NO_LAYER, like(OwnLayer, add=lambda self, x, y, _: x + 0.5 * y)),
    "rarely clamped layer": ("", NO_LAYER, like(OwnLayer, add=lambda self, x, y, _: (x + y).clamp(-65504, 65504))),
    "far layer": ("", NO_LAYER, like(OwnLayer, add=lambda self, x, y, positions: x + y * (positions < 1000)[..., None])),
    "layer that is louder between": ("", NO_LAYER, like(OwnLayer, add=louder_between)),
}


def part_of(model: Any, path: str) -> nn.Module:
    return model.model.layers[1].get_submodule(path)  # type: ignore[no-any-return]


def as_kind(path: str, kind: type[nn.Module]) -> Callable[[Any], None]:
    return lambda model: setattr(part_of(model, path), "__class__", kind)


@pytest.mark.parametrize(("path", "kinds", "kind"), LOOK_ALIKES.values(), ids=LOOK_ALIKES)
def test_look_alikes(path: str, kinds: dict[str, int], kind: type[nn.Module]) -> None:
    with seam.duo(change=as_kind(path, kind)) as pair:
        assert fused(pair.plain) == kinds
        pair.same(**seam.left_padded(ROWS[:4]), max_new_tokens=NEW)


@torch.no_grad()
@pytest.mark.parametrize("name", ["quiet layer", "clamped attention", "quiet attention", "clamped MLP", "mean norm"])
def test_look_alikes_whose_weights_tell_nothing(name: str) -> None:
    """Weights of zero hide what is done to their products, until others are loaded."""
    path, kinds, kind = LOOK_ALIKES[name]
    model = models.tiny("llama").to(torch.bfloat16)
    part_of(model, path).__class__ = kind
    for parameter in model.model.layers[1].parameters():
        parameter.zero_()
    assert fused(model) == kinds


def test_an_odd_module_keeps_none_of_the_others_from_being_fused() -> None:
    """An MLP that returns more than its result."""

    def change(model: Any) -> None:
        layer = part_of(model, "")
        layer.mlp.__class__ = like(LlamaMLP, forward=lambda self, x: (LlamaMLP.forward(self, x), x))
        layer.mlp = nn.Sequential(layer.mlp, like(nn.Module, forward=lambda self, pair: pair[0])())

    with seam.duo(change=change) as pair:
        assert fused(pair.plain) == NO_MLP
        pair.same(PROMPT, max_new_tokens=NEW)


@pytest.mark.parametrize("path", ["", "mlp.act_fn", "mlp.gate_proj", "self_attn"])
def test_a_forward_of_the_users_is_left_alone(path: str) -> None:
    """Before the engine is there, and afterwards."""

    def change(model: Any) -> None:
        module = part_of(model, path)
        module.forward = types.MethodType(halved(type(module).forward), module)

    with seam.duo(change=change) as pair:
        assert fused(pair.plain)["FusedLayer"] == 2
        first = pair.same(PROMPT, max_new_tokens=NEW)
    with seam.duo() as pair:
        pair.same(PROMPT, max_new_tokens=NEW)
        pair.both(change)
        assert torch.equal(pair.same(PROMPT, max_new_tokens=NEW), first)


@pytest.mark.parametrize("kind", [LlamaMLP, LlamaRMSNorm])
def test_a_class_that_is_patched_while_the_engine_is_there(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with seam.duo() as pair:
        before = pair.same(PROMPT, max_new_tokens=NEW)
        monkeypatch.setattr(kind, "forward", halved(kind.forward))
        assert not torch.equal(pair.same(PROMPT, max_new_tokens=NEW), before)


def test_values_of_modules_that_are_changed_later() -> None:
    def soften(model: Any) -> None:
        for layer in model.model.layers:
            layer.input_layernorm.variance_epsilon = layer.post_attention_layernorm.variance_epsilon = 50.0

    def exchange(model: Any) -> None:
        for layer in model.model.layers:
            layer.mlp.act_fn = nn.Tanh()

    with seam.duo() as pair:
        seen = [pair.same(**seam.left_padded(ROWS), max_new_tokens=NEW)]
        for change in (soften, exchange):
            pair.both(change)
            seen.append(pair.same(**seam.left_padded(ROWS), max_new_tokens=NEW))
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(seen, 2))


def test_one_module_in_two_places() -> None:
    def change(model: Any) -> None:
        layers = model.model.layers
        layers[1].mlp = layers[0].mlp
        layers[1].input_layernorm = layers[2].input_layernorm
        layers[2].mlp.gate_proj = layers[0].mlp.gate_proj
        layers[2].self_attn.q_proj.weight = layers[0].self_attn.q_proj.weight

    def write(model: Any) -> None:
        model.model.layers[0].self_attn.q_proj.weight.mul_(-1)
        model.model.layers[0].mlp.gate_proj.weight.mul_(-1)

    with seam.duo(change=change) as pair:
        pair.same(PROMPT, max_new_tokens=NEW)
        pair.both(write)
        pair.same(**seam.left_padded(ROWS), max_new_tokens=NEW)


# -- packs that are given up (test_packing.py: writes to weights) --------------------------------------------------------------


@pytest.fixture
def run_out(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on no weight can be packed again."""

    def fail(pack: Pack) -> None:
        raise RuntimeError("no memory")

    return lambda: monkeypatch.setattr(Pack, "load", fail)


@pytest.mark.parametrize("names", [("gate_proj", "down_proj"), ("down_proj", "gate_proj")])
def test_a_pack_that_is_given_up_takes_what_is_over_it_along(names: tuple[str, ...], run_out: Callable[[], None]) -> None:
    """And the stack of layers apart, but nothing of the other layers."""
    servable = examined(models.tiny("llama"))
    first, layer, last = servable.twin.model.layers
    run_out()
    for name in names:
        product = layer.mlp.get_submodule(name)
        servable.packs.repack([product.weight])
        assert not {"forward"} & {*vars(layer), *vars(layer.mlp), *vars(product)}
        assert isinstance(vars(layer.self_attn)["forward"], Attention)
        assert isinstance(vars(layer.input_layernorm)["forward"], Norm)
        assert all(isinstance(vars(other)["forward"], FusedLayer) for other in (first, last))


def test_tokens_after_a_pack_was_given_up(run_out: Callable[[], None]) -> None:
    with seam.duo() as pair:
        pair.same(PROMPT, max_new_tokens=NEW)
        run_out()
        for paths in (("layers.1.mlp.up_proj", "layers.1.input_layernorm"), ("layers.0.self_attn.q_proj",)):
            for path in paths:
                pair.both(lambda model, path=path: model.model.get_submodule(path).weight.mul_(-1.5))
            pair.same(**seam.left_padded(ROWS), max_new_tokens=NEW)


def test_two_engines_one_after_the_other() -> None:
    plain, served = models.tiny("llama"), models.tiny("llama")
    for _ in range(2):
        with hf_cb.continuous_batching(served) as engine:
            pair = seam.Duo(plain, served, engine)
            pair.same(PROMPT, max_new_tokens=NEW)
        assert not any("forward" in vars(module) for module in served.modules())
        pair.both(lambda model: model.model.layers[1].mlp.gate_proj.weight.mul_(-1.5))


# -- layers in one call ------------------------------------------------------------------------------------------------------


class OpenModel(LlamaModel):
    """LlamaModel with a say between its layers, and at their end."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        cache, first = kwargs.get("cache"), self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(first.shape[1])[None]
        mask = create_causal_mask(self.config, first, attention_mask, cache, position_ids=position_ids)
        given = {"attention_mask": mask, "position_embeddings": self.rotary_emb(first, position_ids), "cache": cache}
        results = [first]
        for layer in self.layers:
            results.append(self.between(layer(results[-1], position_ids=position_ids, **given), first))
        return BaseModelOutputWithPast(last_hidden_state=self.norm(self.end(results[1:])), cache=cache)

    def between(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return x

    def end(self, results: list[torch.Tensor]) -> torch.Tensor:
        return results[-1]


SummingModel = like(OpenModel, end=lambda self, results: torch.stack(results).sum(0))


class OutOfReachError(Exception):
    """A model's own."""


class StrictModel(LlamaModel):
    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        if position_ids is not None and int(position_ids.max()) >= 512:
            raise OutOfReachError
        return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)


@pytest.mark.parametrize(("kind", "kinds"), [(OpenModel, WHOLE), (SummingModel, APART), (StrictModel, APART)])
def test_layers_in_other_models(kind: type[nn.Module], kinds: dict[str, int]) -> None:
    """Found in any loop over them; apart where their results are looked at, or where a model won't be tried."""
    with seam.duo(change=lambda model: setattr(model.model, "__class__", kind)) as pair:
        assert fused(pair.plain) == kinds
        pair.same(PROMPT, max_new_tokens=NEW)
        pair.same(**seam.left_padded(ROWS), max_new_tokens=NEW)


class GatedModel(OpenModel):
    """Adds its embeddings to what each layer gives, as much as a gate says that is shut at first."""

    def between(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return x + (self.gate(first) if isinstance(self.gate, nn.Module) else self.gate * first)


class ScaledLayer(LlamaDecoderLayer):
    """Scaled by what its model hands to it, which is one."""

    def forward(self, hidden_states: torch.Tensor, scale: Any = 1.0, **kwargs: Any) -> torch.Tensor:
        x = hidden_states + scale * self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
        return x + scale * self.mlp(self.post_attention_layernorm(x))


class ScalingModel(LlamaModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for layer in self.layers:
            layer.__class__ = ScaledLayer
        return super().forward(*args, scale=self.scale, **kwargs)


def gate_of_a_number(model: Any) -> None:
    model.model.gate, model.model.__class__ = nn.Parameter(torch.zeros(())), GatedModel


def gate_of_a_module(model: Any) -> None:
    model.model.gate, model.model.__class__ = nn.Linear(48, 48), GatedModel
    model.model.gate.weight.zero_(), model.model.gate.bias.zero_()


def scale_of_one(model: Any) -> None:
    model.model.scale, model.model.__class__ = nn.Parameter(torch.ones(())), ScalingModel


def head_of_zeros(model: Any) -> None:
    model.lm_head.weight.zero_()


def head_of_zeros_over_a_sum(model: Any) -> None:
    model.model.__class__ = SummingModel
    head_of_zeros(model)


def all_of_zeros(model: Any) -> None:
    part_of(model, "mlp").__class__ = UP_FIRST
    for parameter in model.model.parameters():
        parameter.zero_()


def load(model: Any) -> None:
    model.load_state_dict(models.tiny("llama").state_dict())


@pytest.mark.parametrize(
    ("change", "later", "kinds"),
    [
        (gate_of_a_number, lambda model: model.model.gate.fill_(20.0), APART),
        (gate_of_a_module, lambda model: model.model.gate.weight.fill_(20.0), APART),
        (scale_of_one, lambda model: model.model.scale.fill_(0.1), {"Norm": 7, "Attention": 3, "GatedMLP": 3}),
        (head_of_zeros, load, WHOLE),
        (head_of_zeros_over_a_sum, load, APART),
        (all_of_zeros, load, APART),
    ],
)
def test_weights_that_hide_what_a_model_does(
    change: Callable[[Any], None], later: Callable[[Any], object], kinds: dict[str, int]
) -> None:
    """Until they get other numbers."""
    with seam.duo(change=change) as pair:
        assert fused(pair.plain) == kinds
        before = pair.same(PROMPT, max_new_tokens=NEW)
        pair.both(later)
        assert not torch.equal(pair.same(PROMPT, max_new_tokens=NEW), before)
        pair.same(**seam.left_padded(ROWS), max_new_tokens=NEW)


class Twin(nn.Module):
    """Three layers, and what is done with them by the name of `body`."""

    def __init__(self, body: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(3))
        self.embedding = nn.Embedding(8, 16, dtype=dtype)
        self.head = nn.Linear(16, 40, bias=False, dtype=dtype)
        self.turn = nn.Embedding(4, 16, dtype=dtype)
        self._body = getattr(self, body)

    def run(self, ids: torch.Tensor, positions: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return self.head(self._body(self.embedding(ids), positions))[0, indices]  # type: ignore[no-any-return]

    def through(self, layers: Any, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x, position_embeddings=turns)
        return x

    def plain(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        return self.through(self.layers, x, turns)

    def clipping(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        most = 64504 if x.dtype == torch.float16 else 1e5  # as T5 does
        return self.through(self.layers[1:], self.through(self.layers[:1], x, turns).clamp(-most, most), turns)

    def skipping(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        first = self.through(self.layers[:1], x, turns)
        return first + self.through(self.layers[1:], first, turns)

    def turning(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        return self.through(self.layers[2:], self.through(self.layers[:2], x, turns), 2 * turns)

    def fading(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        first = self.through(self.layers[:1], x, turns) * (turns < 1000)[..., None]
        return self.through(self.layers[1:], first, turns)

    def looking_back(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = self.plain(x, turns)
        return 0.5 * x + 0.5 * functional.pad(x, (0, 0, 1, 0))[:, :-1]

    def quiet(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = self.through(self.layers[:1], x, turns)
        return self.through(self.layers[1:], torch.where(x.abs().amax(-1, keepdim=True) < 1e-3, 10 * x, x), turns)

    def rare(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = self.through(self.layers[:2], x, turns)
        return self.through(self.layers[2:], torch.where((turns == 77777)[..., None], -x, x), turns)

    def turned_in_place(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = self.through(self.layers[:2], x, turns)
        turns.mul_(torch.where(turns > 1 << 24, 2, 1))
        return self.through(self.layers[2:], x, turns)

    def summing(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        first = self.through(self.layers[:1], x, turns)
        last = self.through(self.layers[1:], first, turns)
        return last + 0 * first

    def deaf(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        return 0 * self.plain(x, turns) + x

    def with_numbers_between(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = self.through(self.layers[:2], x, turns)
        self.turn(turns % 4)
        return self.through(self.layers[2:], x, turns)


BODIES = {  # of each layer but the last, whether the next follows it; whether the last may be computed for some tokens only
    ((True, True), True): ("plain",),
    ((True, True), False): ("looking_back", "deaf"),
    ((True, False), True): ("turned_in_place", "turning", "with_numbers_between"),
    ((False, False), False): ("clipping", "skipping", "quiet", "rare", "summing", "fading"),
}


@pytest.mark.parametrize(("want", "body"), [(want, body) for want, bodies in BODIES.items() for body in bodies])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_lies_between_and_behind_layers_is_seen(
    body: str, want: tuple[tuple[bool, ...], bool], dtype: torch.dtype
) -> None:
    twin = Twin(body, dtype)
    with torch.no_grad():
        succession = Succession.of(twin, list(twin.layers), torch.zeros(1, 9, 16, dtype=dtype), twin.run)
    assert (succession.follows, succession.selects) == want


def test_tables_that_grew_in_a_trial_are_as_they_were() -> None:
    twin = Twin("plain", torch.float32)
    twin.register_buffer("table", torch.zeros(4))
    twin.longest = 4  # type: ignore[assignment]

    def run(ids: torch.Tensor, positions: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        if int(positions.max()) >= twin.longest:  # type: ignore[operator]
            twin.longest = int(positions.max()) + 1  # type: ignore[assignment]
            twin.table = torch.zeros(twin.longest)
        return twin.run(ids, positions, indices)

    with torch.no_grad():
        succession = Succession.of(twin, list(twin.layers), torch.zeros(1, 9, 16), run)
    assert succession == Succession((True, True), True)
    assert (len(twin.table), twin.longest) == (4, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma", "qwen2"])
def test_a_stack_computes_what_its_layers_do(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, prompts in chunks and decode together: with and without what nobody asks the last layer for."""
    model = models.tiny(name).to(dtype)
    if torch.cpu._is_amx_tile_supported() and dtype == torch.bfloat16:
        pytest.skip("with AMX, many rows are summed in another order")

    def logprobs() -> list[Any]:
        with hf_cb.continuous_batching(model, max_batch_tokens=16, prefix_cache=False) as engine:
            return [result.logprobs for result in in_company(model, engine, logprobs=3)]

    together = logprobs()
    monkeypatch.setattr(fusing, "_runs", lambda layers, succession: [])
    assert logprobs() == together


@pytest.mark.parametrize(
    ("kinds", "sizes", "num_groups"),
    [("sssss", [5], 1), ("ssfssf", [2, 2], 3), ("sssff", [3, 2], 5)],  # the last: its stacks go through several groups
)
def test_stacks_of_layers_with_windows(kinds: str, sizes: list[int], num_groups: int) -> None:
    types = ["sliding_attention" if kind == "s" else "full_attention" for kind in kinds]
    plain, served = (models.tiny("ministral", num_hidden_layers=len(kinds), layer_types=types) for _ in range(2))
    assert [len(stack.layers) for stack in stacks(plain)] == sizes
    with hf_cb.continuous_batching(served) as engine:
        assert inside.scheduler(engine).memory.num_groups == num_groups
        pair = seam.Duo(plain, served, engine)
        pair.same(PROMPT, max_new_tokens=NEW)
        pair.same(**seam.left_padded(ROWS), max_new_tokens=NEW)
