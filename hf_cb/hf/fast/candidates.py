"""Candidates: modules that may get a fused forward, recognised by their parts and then tried.

Each is tried by running its own forward with stand-ins for its products, so that what it does between them is seen bare,
whatever its weights are now and will be later; with numbers small and large, at positions near and far. None: it does something
else, and keeps its own forward.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hf_cb.attention.step import LayerSpec
from hf_cb.hf.fast.equivalence import ERRORS, StandIn, agree, near_and_far, noise, same, scales
from hf_cb.hf.fast.fused_forwards import Attention, FusedLayer, GatedMLP, Norm
from hf_cb.hf.fast.packing import Pack
from hf_cb.hf.fast.products import kernels_panel
from hf_cb.hf.twins.attention import port_of, set_port
from hf_cb.hf.twins.forwards import replaced

_ACTIVATIONS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {  # by their numbers in csrc/linear.h
    1: nn.functional.silu,
    2: nn.functional.gelu,
    3: functools.partial(nn.functional.gelu, approximate="tanh"),
}
_NORMS = ((0.0, False), (0.0, True), (1.0, True), (1.0, False))  # (added to the weight, whether it is rounded only at the end)
_USUAL = ("hidden_states", "position_ids", "attention_mask", "cache_position")
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a module's forward."""


def others(module: nn.Module, packs: Sequence[Pack]) -> list[nn.Module]:
    """The children that are not packed."""
    packed = [layer for pack in packs for layer in pack.modules]
    return [child for child in module.children() if child not in packed]


def _is_given_more(kwargs: dict[str, Any]) -> bool:
    """Whether there are numbers among the arguments of a layer or an attention module that those usually don't get: a gate of
    ones, say, does nothing until it is another."""
    return any(isinstance(value, torch.Tensor | float) for name, value in kwargs.items() if name not in _USUAL)


def gated_mlp(module: nn.Module, first: Pack, second: Pack) -> GatedMLP | None:
    """The fused form of a gated MLP, over the packs of its two inputs."""
    linear, width = first.modules[0], first.packed.width
    if width % (2 * kernels_panel()) or not isinstance(linear, nn.Linear):
        return None
    if len(inspect.signature(type(module).forward).parameters) != 2:
        return None
    dtype = linear.weight.dtype
    joined = [noise((1, 5, width), dtype, seed=1) * scale for scale in scales(dtype)]
    try:
        wanted = [_between(module, first, second, inner, linear.in_features) for inner in joined]
        for number in _activations(module, (first, second), dtype):
            for swapped in (False, True):
                halves = [inner.chunk(2, -1)[:: -1 if swapped else 1] for inner in joined]
                if agree([_ACTIVATIONS[number](gate) * up for gate, up in halves], wanted, half=2e-3):
                    return GatedMLP(first, second, number, swapped)
    except ERRORS:
        pass
    return None


def _between(module: nn.Module, first: Pack, second: Pack, joined: torch.Tensor, size: int) -> torch.Tensor:
    """What the second product is given where the first gives `joined`. Raises ValueError for what is done before or after."""
    x = noise((1, 5, size), joined.dtype) * float(joined.abs().amax())
    parts = [StandIn(part) for part in joined.split(first.widths, -1)]
    last = StandIn(noise((1, 5, second.packed.width), joined.dtype, seed=2) * float(joined.abs().amax()))
    with replaced({**dict(zip(first.modules, parts, strict=True)), second.modules[0]: last}):
        out = type(module).forward(module, x.clone())
    if not all(part.was_given(x) for part in parts) or len(last.given) != 1 or not same(out, last.answer):
        raise ValueError("an MLP of another kind")
    return last.given[0]


def _activations(module: nn.Module, packs: Sequence[Pack], dtype: torch.dtype) -> Iterator[int]:
    """Those that the module's own may be. In half precision two are nearly the same: its activation is tried by itself."""
    own = [child for child in others(module, packs) if not isinstance(child, nn.Dropout)]
    x = torch.linspace(-8, 8, 1001, dtype=torch.float32, device="cpu")
    for number, function in _ACTIVATIONS.items():
        if len(own) == 1:
            if agree([own[0](x)], [function(x)]):
                yield number
        elif dtype == torch.float32:
            yield number


def attention(module: nn.Module, spec: LayerSpec, first: Pack, second: Pack, call: Call | None) -> Attention | None:
    """The fused form of an attention module with rotary positions, over the packs of its two inputs."""
    if call is None or call[0] or spec.has_sinks or spec.head_size != spec.value_head_size or spec.kv_dtype is not None:
        return None
    kwargs = call[1]
    x, turns = kwargs.get("hidden_states"), kwargs.get("position_embeddings")
    if not isinstance(x, torch.Tensor) or not isinstance(turns, tuple) or len(turns) != 2:
        return None
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    if first.packed.width != sum(heads) * spec.head_size:
        return None
    if any(turn.shape != (1, x.shape[1], spec.head_size) or turn.dtype != x.dtype for turn in turns) or _is_given_more(kwargs):
        return None
    fused = Attention(module, spec, first, second)
    port = port_of(module)
    try:
        agreed = all(_attends(fused, scale, own) for scale in scales(x.dtype) for own in near_and_far(kwargs))
    except ERRORS:
        return None
    finally:
        set_port(module, port)
    return fused if agreed else None


class _Witness:
    """A port that keeps what it is given, and answers with something else."""

    def __init__(self, answer: torch.Tensor) -> None:
        self.seen: list[torch.Tensor] = []
        self.answer = answer

    def serve(
        self, module: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        self.seen += [q.clone(), k.clone(), v.clone()]
        return self.answer.clone()


def _attends(fused: Attention, scale: float, kwargs: dict[str, Any]) -> bool:
    """Whether the module's own forward does the same with what its products give."""
    module, dtype, tokens = fused.module, kwargs["hidden_states"].dtype, kwargs["hidden_states"].shape[1]
    x = noise(kwargs["hidden_states"].shape, dtype) * scale
    joined = noise((1, tokens, fused.joined.packed.width), dtype, seed=1) * scale / 2  # a turn makes them larger
    parts = [StandIn(part) for part in joined.split(fused.joined.widths, -1)]
    last = StandIn(noise((1, tokens, fused.out.packed.width), dtype, seed=2) * scale)
    witness = _Witness(noise((tokens, fused.heads[0], fused.size), dtype, seed=3) * scale)
    set_port(module, witness)
    with replaced({**dict(zip(fused.joined.modules, parts, strict=True)), fused.out.modules[0]: last}):
        out, weights = type(module).forward(module, **{**kwargs, "hidden_states": x.clone()})
    torch.ops.hf_cb.rotate(joined, *kwargs["position_embeddings"], fused.turned)
    return (
        all(part.was_given(x) for part in parts)
        and agree(witness.seen, fused.parts(joined))
        and last.was_given(witness.answer.view(1, tokens, -1))
        and same(out, last.answer)
        and weights is None
    )


def is_norm(module: nn.Module) -> bool:
    """A weight for each number of a row, and nothing else."""
    weight = module._parameters.get("weight")
    return (
        [*module._parameters] == ["weight"]
        and not module._buffers
        and not module._modules
        and "forward" not in vars(module)
        and weight is not None
        and type(weight.data) is torch.Tensor
        and weight.dim() == 1
        and weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and any(isinstance(vars(module).get(name), float) for name in _EPS_NAMES)
        and len(inspect.signature(type(module).forward).parameters) == 2
    )


def norm(module: nn.Module) -> Norm | None:
    """The fused form of a norm by the root mean square."""
    own, eps = module.get_parameter("weight"), next(e for n in _EPS_NAMES if isinstance(e := vars(module).get(n), float))
    weight, x = noise(own.shape, own.dtype, seed=1), noise((1, 3, len(own)), own.dtype)
    inputs = [x * scale for scale in (*scales(own.dtype), eps**0.5)]  # the smallest tell what is added to the mean square
    inputs += [torch.cat([x[..., :1] + 1000, x[..., 1:]], -1)]  # one that stands out is still large when it is normed
    try:
        wanted = [torch.func.functional_call(module, {"weight": weight}, (x,)) for x in inputs]
        for offset, late in _NORMS:
            fused = Norm(module, weight, eps, offset, late)
            if agree([fused(x) for x in inputs], wanted):
                return dataclasses.replace(fused, weight=own)
    except ERRORS:
        pass
    return None


def layer(module: nn.Module, call: Call) -> tuple[FusedLayer | None, list[Pack]]:
    """The fused form of a decoder layer, and the packs that it uses."""
    parts = {child: vars(child).get("forward") for child in module.children()}
    norms = [part for part in parts.values() if isinstance(part, Norm)]
    attentions = [part for part in parts.values() if isinstance(part, Attention)]
    mlps = [part for part in parts.values() if isinstance(part, GatedMLP)]
    numbers = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    unfused = [child for child, part in parts.items() if not isinstance(part, Norm | Attention | GatedMLP)]
    numbers += [tensor for child in unfused for tensor in (*child.parameters(), *child.buffers())]
    args, kwargs = call
    if numbers or (len(norms), len(attentions), len(mlps)) != (2, 1, 1) or len(args) != 1 or "forward" in vars(module):
        return None, []
    if _is_given_more(kwargs):
        return None, []
    (attention,), (mlp,) = attentions, mlps
    for first, second in (norms, norms[::-1]):
        fused = FusedLayer(first, attention, second, mlp)
        children = [next(child for child, part in parts.items() if part is own) for own in (first, attention, second, mlp)]
        try:
            runs = [
                (noise(args[0].shape, args[0].dtype) * scale, own)
                for scale in scales(args[0].dtype)
                for own in near_and_far(kwargs)
            ]
            if all(_is_made_of(module, children, x, own) for x, own in runs):
                return fused, [attention.joined, attention.out, mlp.inner, mlp.down]
        except ERRORS:
            pass
    return None, []


def _is_made_of(module: nn.Module, children: list[nn.Module], x: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether the module's own forward puts a norm, attention, another norm and an MLP together as `FusedLayer` does."""
    scale = float(x.abs().amax()) / 4
    answers = [noise(x.shape, x.dtype, seed=i) * scale for i in range(1, 5)]
    stand_ins = [StandIn(answer, (None,) if i == 1 else ()) for i, answer in enumerate(answers)]
    with replaced(dict(zip(children, stand_ins, strict=True))):
        out = type(module).forward(module, x.clone(), **kwargs)
    first, attended, second, last = answers
    wanted = (x, first, x + attended, second)
    return (
        all(stand_in.was_given(given) for stand_in, given in zip(stand_ins, wanted, strict=True))
        and stand_ins[1].others.get("position_embeddings") is kwargs["position_embeddings"]
        and same(out, x + attended + last)
    )
