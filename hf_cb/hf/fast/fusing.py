"""Norms, gated MLPs, attention modules and decoder layers of the twin, each in one or a few passes of the compiled kernels.

transformers' own code for these takes some forty small operations a layer. With few tokens their calls take as long as the
products, with many they carry every number through memory a dozen times. What a module computes is recognised by its parts,
then tried: its own forward runs with stand-ins for its products, so that what it does between them is seen bare, whatever its
weights are now and will be later; with numbers small and large, at positions near and far. Where that is what the short forward
(`short.py`) does, the module gets it; everything else of the model stays transformers' code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hf_cb.attention.step import LayerSpec
from hf_cb.hf.fast.equivalence import ERRORS, StandIn, agree, near_and_far, noise, same, scales
from hf_cb.hf.fast.fused_forwards import Attention, FusedLayer, GatedMLP, Norm, Stack
from hf_cb.hf.fast.packing import Pack, Packs
from hf_cb.hf.fast.products import OwnPacked, kernels_panel
from hf_cb.hf.fast.stacking import Chain
from hf_cb.hf.twins.attention import port_of, set_port
from hf_cb.hf.twins.forwards import replaced
from hf_cb.runtime.model_runner import Forward

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


@contextlib.contextmanager
def calls_of(modules: Sequence[nn.Module]) -> Iterator[dict[nn.Module, Call]]:
    """The first call of each module inside."""
    calls: dict[nn.Module, Call] = {}

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.setdefault(module, (args, kwargs))
        return type(module).forward(module, *args, **kwargs)

    own = [module for module in modules if "forward" not in vars(module)]  # accelerate's hooks are there
    with replaced({module: functools.partial(forward, module) for module in own}):
        yield calls


def parents_of(twin: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that have one of `modules` among their children."""
    wanted = set(modules)
    return [module for module in twin.modules() if not wanted.isdisjoint(module.children())]


class Fused:
    """The modules of a twin that got a short forward. A weight that is packed again is followed; one that no longer is takes
    its module's short forward with it."""

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []

    def fuse(
        self,
        twin: nn.Module,
        groups: Sequence[list[nn.Module]],
        packs: Packs,
        attention: Sequence[tuple[nn.Module, LayerSpec]],
        calls: dict[nn.Module, Call],
        forward: Forward | None = None,
    ) -> None:
        """`groups`: of linear layers, as they were packed. `calls`: one of each attention module and of its layer, in their
        order. `forward`: of the twin, where the compiled kernels attend. Modules whose trial fails stay as they are."""
        if not kernels_panel():
            return
        specs = dict(attention)
        for module, own_groups in _groups_by_parent(twin, groups).items():
            found = [pack for group in own_groups if (pack := packs.of(*group)) is not None]
            if len(own_groups) != 2 or len(found) != 2 or not _is_bare(module, found):
                continue
            if module in specs:
                self._set(module, _attention(module, specs[module], found[0], found[1], calls.get(module)), found)
            else:
                self._set(module, _gated_mlp(module, found[0], found[1]), found)
        for module in twin.modules():
            if _is_norm(module):
                self._set(module, _norm(module))
        for module in twin.modules():
            if module in calls and module not in specs:
                self._set(module, *_layer(module, calls[module]))
        layers = [module for module in calls if module not in specs]
        if forward is not None and len(layers) == len(specs):
            self._stack(twin, layers, calls, forward)

    def _stack(self, twin: nn.Module, layers: list[nn.Module], calls: dict[nn.Module, Call], forward: Forward) -> None:
        """Give the layers that follow each other, and have one form, to the first of them."""
        args = calls[layers[0]][0]
        if len(args) != 1 or not isinstance(args[0], torch.Tensor):
            return
        chain = Chain.of(twin, layers, args[0], forward)
        for run in _runs(layers, chain):
            stack = Stack({module: vars(module)["forward"] for module in run}, chain.selects and run[-1] is layers[-1])
            stack.put()
            for pack in stack.packs:
                pack.users.append(stack.take_apart)

    def undo(self) -> None:
        """Give the modules their own forward back."""
        for module in self._modules:
            vars(module).pop("forward", None)

    def _set(self, module: nn.Module, forward: Callable[..., Any] | None, packs: Sequence[Pack] = ()) -> None:
        if forward is None:
            return
        vars(module)["forward"] = forward
        self._modules.append(module)
        for pack in packs:
            pack.users.append(functools.partial(vars(module).pop, "forward", None))


def _is_given_more(kwargs: dict[str, Any]) -> bool:
    """Whether there are numbers among the arguments of a layer or an attention module that those usually don't get: a gate of
    ones, say, does nothing until it is another."""
    return any(isinstance(value, torch.Tensor | float) for name, value in kwargs.items() if name not in _USUAL)


def _groups_by_parent(twin: nn.Module, groups: Sequence[list[nn.Module]]) -> dict[nn.Module, list[list[nn.Module]]]:
    """The groups of layers that are all children of one module, in the order of their calls."""
    parents = {child: module for module in twin.modules() for child in module.children()}
    found: dict[nn.Module, list[list[nn.Module]]] = {}
    for group in groups:
        owners = {parents.get(layer) for layer in group}
        owner = owners.pop()
        if not owners and owner is not None:
            found.setdefault(owner, []).append(group)
    return found


def _others(module: nn.Module, packs: Sequence[Pack]) -> list[nn.Module]:
    """The children that are not packed."""
    packed = [layer for pack in packs for layer in pack.modules]
    return [child for child in module.children() if child not in packed]


def _is_bare(module: nn.Module, packs: Sequence[Pack]) -> bool:
    """Whether there are no numbers in it but those of two inputs' linear layers, and nobody else has replaced its forward."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    tensors += [tensor for child in _others(module, packs) for tensor in (*child.parameters(), *child.buffers())]
    own = all(isinstance(pack.packed, OwnPacked) for pack in packs)
    return own and not tensors and "forward" not in vars(module) and len(packs[1].modules) == 1


# -- gated MLPs --------------------------------------------------------------------------------------------------------------


def _gated_mlp(module: nn.Module, first: Pack, second: Pack) -> GatedMLP | None:
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
    others = [child for child in _others(module, packs) if not isinstance(child, nn.Dropout)]
    x = torch.linspace(-8, 8, 1001, dtype=torch.float32, device="cpu")
    for number, function in _ACTIVATIONS.items():
        if len(others) == 1:
            if agree([others[0](x)], [function(x)]):
                yield number
        elif dtype == torch.float32:
            yield number


# -- attention ---------------------------------------------------------------------------------------------------------------


def _attention(module: nn.Module, spec: LayerSpec, first: Pack, second: Pack, call: Call | None) -> Attention | None:
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
    short = Attention(module, spec, first, second)
    port = port_of(module)
    try:
        agreed = all(_attends(short, scale, own) for scale in scales(x.dtype) for own in near_and_far(kwargs))
    except ERRORS:
        return None
    finally:
        set_port(module, port)
    return short if agreed else None


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


def _attends(short: Attention, scale: float, kwargs: dict[str, Any]) -> bool:
    """Whether the module's own forward does the same with what its products give."""
    module, dtype, tokens = short.module, kwargs["hidden_states"].dtype, kwargs["hidden_states"].shape[1]
    x = noise(kwargs["hidden_states"].shape, dtype) * scale
    joined = noise((1, tokens, short.joined.packed.width), dtype, seed=1) * scale / 2  # a turn makes them larger
    parts = [StandIn(part) for part in joined.split(short.joined.widths, -1)]
    last = StandIn(noise((1, tokens, short.out.packed.width), dtype, seed=2) * scale)
    witness = _Witness(noise((tokens, short.heads[0], short.size), dtype, seed=3) * scale)
    set_port(module, witness)
    with replaced({**dict(zip(short.joined.modules, parts, strict=True)), short.out.modules[0]: last}):
        out, weights = type(module).forward(module, **{**kwargs, "hidden_states": x.clone()})
    torch.ops.hf_cb.rotate(joined, *kwargs["position_embeddings"], short.turned)
    return (
        all(part.was_given(x) for part in parts)
        and agree(witness.seen, short.parts(joined))
        and last.was_given(witness.answer.view(1, tokens, -1))
        and same(out, last.answer)
        and weights is None
    )


# -- norms -------------------------------------------------------------------------------------------------------------------


def _is_norm(module: nn.Module) -> bool:
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


def _norm(module: nn.Module) -> Norm | None:
    own, eps = module.get_parameter("weight"), next(e for n in _EPS_NAMES if isinstance(e := vars(module).get(n), float))
    weight, x = noise(own.shape, own.dtype, seed=1), noise((1, 3, len(own)), own.dtype)
    inputs = [x * scale for scale in (*scales(own.dtype), eps**0.5)]  # the smallest tell what is added to the mean square
    inputs += [torch.cat([x[..., :1] + 1000, x[..., 1:]], -1)]  # one that stands out is still large when it is normed
    try:
        wanted = [torch.func.functional_call(module, {"weight": weight}, (x,)) for x in inputs]
        for offset, late in _NORMS:
            short = Norm(module, weight, eps, offset, late)
            if agree([short(x) for x in inputs], wanted):
                return dataclasses.replace(short, weight=own)
    except ERRORS:
        pass
    return None


# -- whole layers ------------------------------------------------------------------------------------------------------------


def _layer(module: nn.Module, call: Call) -> tuple[FusedLayer | None, list[Pack]]:
    """With the packs that it uses."""
    parts = {child: vars(child).get("forward") for child in module.children()}
    norms = [part for part in parts.values() if isinstance(part, Norm)]
    attentions = [part for part in parts.values() if isinstance(part, Attention)]
    mlps = [part for part in parts.values() if isinstance(part, GatedMLP)]
    numbers = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    others = [child for child, part in parts.items() if not isinstance(part, Norm | Attention | GatedMLP)]
    numbers += [tensor for child in others for tensor in (*child.parameters(), *child.buffers())]
    args, kwargs = call
    if numbers or (len(norms), len(attentions), len(mlps)) != (2, 1, 1) or len(args) != 1 or "forward" in vars(module):
        return None, []
    if _is_given_more(kwargs):
        return None, []
    (attention,), (mlp,) = attentions, mlps
    for first, second in (norms, norms[::-1]):
        short = FusedLayer(first, attention, second, mlp)
        children = [next(child for child, part in parts.items() if part is own) for own in (first, attention, second, mlp)]
        try:
            runs = [
                (noise(args[0].shape, args[0].dtype) * scale, own)
                for scale in scales(args[0].dtype)
                for own in near_and_far(kwargs)
            ]
            if all(_is_made_of(module, children, x, own) for x, own in runs):
                return short, [attention.joined, attention.out, mlp.inner, mlp.down]
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


# -- layers that follow each other -------------------------------------------------------------------------------------------


def _runs(layers: list[nn.Module], chain: Chain) -> list[list[nn.Module]]:
    """Two and more layers that can be computed by one call."""
    forms = [_form(module) for module in layers]
    runs = [layers[:1]]
    for i in range(1, len(layers)):
        if chain.follows[i - 1] and forms[i] is not None and forms[i] == forms[i - 1]:
            runs[-1].append(layers[i])
        else:
            runs.append([layers[i]])
    return [run for run in runs if len(run) > 1]


def _form(module: nn.Module) -> tuple[object, ...] | None:
    """See FusedLayer.form; None where there is no such layer, or its norms differ."""
    layer = vars(module).get("forward")
    if not isinstance(layer, FusedLayer) or layer.first.numbers[1:] != layer.second.numbers[1:]:
        return None
    return layer.form
