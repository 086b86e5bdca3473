"""Norms, gated MLPs and attention modules of the twin, each in one or a few passes of the compiled kernels.

transformers' own code for these takes some forty small operations a layer. With few tokens their calls take as long as the
products, with many they carry every number through memory a dozen times. What a module computes is recognised by its parts,
then tried: on numbers small and large, at positions near and far, its own forward and the short one must agree. Where they do
the module gets the short one; everything else of the model stays transformers' code.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_cb.attention.step import LayerSpec
from hf_cb.hf.attention import Port, port_of, set_port
from hf_cb.hf.packing import Pack, Packs
from hf_cb.hf.products import OwnPacked, kernels_panel

_SCALES = (1.0, 300.0)  # of what modules are tried with: some clip what is large
_FAR = 1 << 20  # tokens: some scale their queries by the position
_TRIAL_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError)
_ACTIVATIONS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {  # by their numbers in csrc/linear.h
    1: nn.functional.silu,
    2: nn.functional.gelu,
    3: functools.partial(nn.functional.gelu, approximate="tanh"),
}
_NORMS = ((0.0, False), (0.0, True), (1.0, True), (1.0, False))  # (added to the weight, whether it is rounded only at the end)
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a module's forward."""


@contextlib.contextmanager
def calls_of(modules: Sequence[nn.Module]) -> Iterator[dict[nn.Module, Call]]:
    """The latest call of each module inside."""
    calls: dict[nn.Module, Call] = {}

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls[module] = args, kwargs
        return type(module).forward(module, *args, **kwargs)

    own = [module for module in modules if "forward" not in vars(module)]  # accelerate's hooks are there
    for module in own:
        vars(module)["forward"] = functools.partial(forward, module)
    try:
        yield calls
    finally:
        for module in own:
            del vars(module)["forward"]


def parents_of(twin: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that have one of `modules` among their children."""
    wanted = set(modules)
    return [module for module in twin.modules() if not wanted.isdisjoint(module.children())]


class Fused:
    """The modules of a twin that got a short forward. A weight that is packed again is followed; one that no longer is takes its
    module's short forward with it."""

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []

    def fuse(
        self,
        twin: nn.Module,
        groups: Sequence[list[nn.Module]],
        packs: Packs,
        attention: Sequence[tuple[nn.Module, LayerSpec]],
        calls: dict[nn.Module, Call],
    ) -> None:
        """`groups`: of linear layers, as they were packed. `calls`: one of each attention module and of its layer. Modules whose trial fails
        stay as they are."""
        if not kernels_panel():
            return
        specs = dict(attention)
        for module, own_groups in _groups_by_parent(twin, groups).items():
            found = [pack for group in own_groups if (pack := packs.of(*group)) is not None]
            if len(own_groups) != 2 or len(found) != 2 or not _is_bare(module):
                continue
            if not all(isinstance(pack.packed, OwnPacked) for pack in found):
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
            pack.users.append(module)


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


def _is_bare(module: nn.Module) -> bool:
    """Whether there are no numbers in it but its linear layers', and nobody else has replaced its forward."""
    linear = [child for child in module.children() if "forward" in vars(child)]
    others = [child for child in module.children() if child not in linear]
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    tensors += [tensor for child in others for tensor in (*child.parameters(), *child.buffers())]
    return not tensors and "forward" not in vars(module)


# -- gated MLPs --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _GatedMLP:
    """down(activation(gate(x)) * up(x)): gate and up are two layers over one input, or one layer's halves."""

    inner: Pack
    down: Pack
    activation: int
    swapped: bool  # up comes first

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down.product(self.inner.own().gated(x, self.activation, self.swapped))


def _gated_mlp(module: nn.Module, first: Pack, second: Pack) -> _GatedMLP | None:
    own = type(module).forward
    if first.packed.width % (2 * kernels_panel()) or len(inspect.signature(own).parameters) != 2:
        return None
    size, dtype = first.modules[0].weight.shape[-1], first.modules[0].weight.dtype
    if not isinstance(first.modules[0], nn.Linear):
        return None
    inputs = [_noise((1, 5, size), dtype) * scale for scale in _SCALES]
    try:
        wanted = [own(module, x) for x in inputs]
    except _TRIAL_ERRORS:
        return None
    for activation in _activations(module, dtype):
        for swapped in (False, True):
            short = _GatedMLP(first, second, activation, swapped)
            if _agree(lambda short=short: [short(x) for x in inputs], wanted):  # type: ignore[misc]
                return short
    return None


def _activations(module: nn.Module, dtype: torch.dtype) -> Iterator[int]:
    """Those that the module's own may be. In half precision two are nearly the same: its activation is tried by itself."""
    others = [child for child in module.children() if not isinstance(child, nn.Dropout) and "forward" not in vars(child)]
    x = torch.linspace(-8, 8, 1001)
    for number, function in _ACTIVATIONS.items():
        if len(others) == 1:
            if _agree(lambda: [others[0](x)], [function(x)]):
                yield number
        elif dtype == torch.float32:
            yield number


# -- attention ---------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Attention:
    """Queries, keys and values in one product, rotary positions over whole heads, attention, and the product of the output."""

    module: nn.Module
    joined: Pack
    out: Pack
    heads: tuple[int, int, int]  # of queries, keys, values
    size: int

    @property
    def turned(self) -> int:
        """The heads that get rotary positions."""
        return self.heads[0] + self.heads[1]

    def attend(self, joined: torch.Tensor) -> torch.Tensor:
        """[1, T, all heads * size] -> [1, T, query heads * size]."""
        q, k, v = joined.view(-1, sum(self.heads), self.size).split_with_sizes(self.heads, 1)
        return port_of(self.module).serve(self.module, q, k, v, None).view(1, -1, self.heads[0] * self.size)

    def __call__(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [1, T, in] -> ([1, T, out], None)."""
        joined = self.joined.product(hidden_states)
        torch.ops.hf_cb.rotate(joined, *position_embeddings, self.turned)
        return self.out.product(self.attend(joined)), None


def _attention(module: nn.Module, spec: LayerSpec, first: Pack, second: Pack, call: Call | None) -> _Attention | None:
    if call is None or call[0] or spec.has_sinks or spec.head_size != spec.value_head_size or spec.kv_dtype is not None:
        return None
    kwargs = call[1]
    x, turns = kwargs.get("hidden_states"), kwargs.get("position_embeddings")
    if not isinstance(x, torch.Tensor) or not isinstance(turns, tuple) or len(turns) != 2:
        return None
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    if first.packed.width != sum(heads) * spec.head_size:
        return None
    if any(turn.shape != (1, x.shape[1], spec.head_size) or turn.dtype != x.dtype for turn in turns):
        return None
    short = _Attention(module, first, second, heads, spec.head_size)
    port = port_of(module)
    trials = [{**kwargs, "hidden_states": _noise(x.shape, x.dtype) * scale} for scale in _SCALES]
    trials += [{name: _far(value) for name, value in trials[0].items()}]
    try:
        wanted = [
            tensor for trial in trials for tensor in _seen(module, functools.partial(type(module).forward, module), trial)
        ]
        agreed = _agree(lambda: [tensor for trial in trials for tensor in _seen(module, short, trial)], wanted)
    except _TRIAL_ERRORS:
        return None
    finally:
        set_port(module, port)
    return short if agreed else None


class _Witness:
    """A port that keeps what it is given, and answers with the queries."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def serve(
        self, module: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        self.seen += [q.clone(), k.clone(), v.clone()]
        return q.contiguous()


def _seen(module: nn.Module, forward: Callable[..., Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Queries, keys and values that a forward attends with, and what it returns."""
    witness = _Witness()
    set_port(module, witness)
    out, weights = forward(**kwargs)
    if weights is not None or len(witness.seen) != 3:
        raise ValueError("an attention module of another kind")
    return [*witness.seen, out]


def _far(value: Any) -> Any:
    """Positions moved far away."""
    if isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64):
        return value + _FAR
    return value


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
    )


@dataclass(slots=True, eq=False)
class _Norm:
    """x / sqrt(mean(x^2) + eps) * (weight + offset)."""

    module: nn.Module
    weight: torch.Tensor
    eps: float
    offset: float
    late: bool  # rounded only at the end, not before the weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.weight.dtype:
            return type(self.module).forward(self.module, x)  # type: ignore[no-any-return]
        return torch.ops.hf_cb.rms_norm(x, *self.numbers)  # type: ignore[no-any-return]

    @property
    def numbers(self) -> tuple[torch.Tensor, float, float, bool]:
        """As the kernels take them."""
        return self.weight, self.eps, self.offset, self.late


def _norm(module: nn.Module) -> _Norm | None:
    weight = module.get_parameter("weight")
    eps = next(eps for name in _EPS_NAMES if isinstance(eps := vars(module).get(name), float))
    # The smallest tell what is added to the mean square.
    inputs = [_noise((1, 3, len(weight)), weight.dtype) * scale for scale in (*_SCALES, eps**0.5)]
    own = type(module).forward
    try:
        wanted = [own(module, x) for x in inputs]
    except _TRIAL_ERRORS:
        return None
    for offset, late in _NORMS:
        short = _Norm(module, weight, eps, offset, late)
        if _agree(lambda short=short: [short(x) for x in inputs], wanted, closely=True):  # type: ignore[misc]
            return short
    return None


# -- whole layers ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Layer:
    """x + attention(norm(x)), then the same with another norm and a gated MLP: in two calls round the attention's."""

    first: _Norm
    attention: _Attention
    second: _Norm
    mlp: _GatedMLP

    def __call__(
        self, x: torch.Tensor, *_: Any, position_embeddings: tuple[torch.Tensor, torch.Tensor], **__: Any
    ) -> torch.Tensor:
        """[1, T, width] -> [1, T, width]."""
        attention, mlp = self.attention, self.mlp
        joined, out, inner, down = attention.joined.own(), attention.out.own(), mlp.inner.own(), mlp.down.own()
        ops = torch.ops.hf_cb
        before = ops.before_attention(
            x,
            *self.first.numbers,
            joined.weight,
            joined.bias,
            joined.width,
            joined.matrix,
            *position_embeddings,
            attention.turned,
        )
        return ops.after_attention(  # type: ignore[no-any-return]
            *(attention.attend(before), x, out.weight, out.bias, *self.second.numbers),
            *(inner.weight, inner.bias, inner.width // 2, mlp.activation, mlp.swapped, down.weight, down.bias, down.matrix),
        )


def _layer(module: nn.Module, call: Call) -> tuple[_Layer | None, list[Pack]]:
    """With the packs that it uses."""
    parts = [vars(child).get("forward") for child in module.children()]
    kinds = {kind: [part for part in parts if isinstance(part, kind)] for kind in (_Norm, _Attention, _GatedMLP)}
    numbers = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    others = [child for child, part in zip(module.children(), parts, strict=True) if not isinstance(part, (*kinds,))]
    numbers += [tensor for child in others for tensor in (*child.parameters(), *child.buffers())]
    args, kwargs = call
    if numbers or [len(found) for found in kinds.values()] != [2, 1, 1] or len(args) != 1 or "forward" in vars(module):
        return None, []
    (attention,), (mlp,) = kinds[_Attention], kinds[_GatedMLP]
    port = port_of(module)
    trials = [_noise(args[0].shape, args[0].dtype) * scale for scale in _SCALES]
    for norms in (kinds[_Norm], kinds[_Norm][::-1]):
        short = _Layer(norms[0], attention, norms[1], mlp)
        set_port(module, _Witness())
        try:
            wanted = [type(module).forward(module, x, **kwargs) for x in trials]
            agreed = _agree(lambda short=short: [short(x, **kwargs) for x in trials], wanted)  # type: ignore[misc]
        except _TRIAL_ERRORS:
            return None, []
        finally:
            set_port(module, port)
        if agreed:
            return short, [attention.joined, attention.out, mlp.inner, mlp.down]
    return None, []


# -- trials ------------------------------------------------------------------------------------------------------------------


def _noise(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _agree(run: Callable[[], list[torch.Tensor]], wanted: list[torch.Tensor], closely: bool = False) -> bool:
    """Whether what `run` gives is what is wanted, but for the rounding of sums; `closely`: but for some last bits."""
    try:
        got = run()
    except _TRIAL_ERRORS:
        return False
    for one, other in zip(got, wanted, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        a, b = one.double(), other.double()
        if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
            return False
        error, largest = (a - b).abs(), b.abs().amax()
        if one.dtype == torch.float32:
            if bool(error.amax() > 2e-6 * largest):
                return False
        elif bool(error.mean() > (2e-4 if closely else 2e-3) * b.abs().mean()) or bool(error.amax() > 0.02 * largest):
            return False
    return True
