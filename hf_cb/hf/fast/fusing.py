"""Norms, gated MLPs, attention modules and decoder layers of the twin, each in one or a few passes of the compiled kernels.

transformers' own code for these takes some forty small operations a layer. With few tokens their calls take as long as the
products, with many they carry every number through memory a dozen times. Where a module does what a fused forward does
(`candidates.py` finds out), it gets that; everything else of the model stays transformers' code.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hf_cb.attention.step import LayerSpec
from hf_cb.hf.fast.candidates import Call, attention, gated_mlp, is_norm, layer, norm, others
from hf_cb.hf.fast.fused_forwards import FusedLayer, Stack
from hf_cb.hf.fast.packing import Pack, Packs
from hf_cb.hf.fast.products import OwnPacked, kernels_panel
from hf_cb.hf.fast.stacking import Succession
from hf_cb.hf.twins.forwards import replaced
from hf_cb.runtime.model_runner import Forward


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
    """The modules of a twin that got a fused forward. A weight that is packed again is followed; one that no longer is takes
    its module's fused forward with it."""

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []

    def fuse(
        self,
        twin: nn.Module,
        groups: Sequence[list[nn.Module]],
        packs: Packs,
        specs: dict[nn.Module, LayerSpec],
        calls: dict[nn.Module, Call],
        forward: Forward | None = None,
    ) -> None:
        """`groups`: of linear layers, as they were packed. `calls`: one of each attention module and of its layer, in their
        order. `forward`: of the twin, where the compiled kernels attend. Modules that do something else stay as they are."""
        if not kernels_panel():
            return
        for module, own_groups in _groups_by_parent(twin, groups).items():
            found = [pack for group in own_groups if (pack := packs.of(*group)) is not None]
            if len(own_groups) != 2 or len(found) != 2 or not _is_bare(module, found):
                continue
            if module in specs:
                self._set(module, attention(module, specs[module], found[0], found[1], calls.get(module)), found)
            else:
                self._set(module, gated_mlp(module, found[0], found[1]), found)
        for module in twin.modules():
            if is_norm(module):
                self._set(module, norm(module))
        for module in twin.modules():
            if module in calls and module not in specs:
                self._set(module, *layer(module, calls[module]))
        layers = [module for module in calls if module not in specs]
        if forward is not None and 0 < len(layers) == len(specs):
            self._stack(twin, layers, calls, forward)

    def _stack(self, twin: nn.Module, layers: list[nn.Module], calls: dict[nn.Module, Call], forward: Forward) -> None:
        """Give the layers that follow each other, and have one form, to the first of them."""
        args = calls[layers[0]][0]
        if len(args) != 1 or not isinstance(args[0], torch.Tensor):
            return
        succession = Succession.of(twin, layers, args[0], forward)
        for run in _runs(layers, succession):
            stack = Stack({module: vars(module)["forward"] for module in run}, succession.selects and run[-1] is layers[-1])
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


def _is_bare(module: nn.Module, packs: Sequence[Pack]) -> bool:
    """Whether there are no numbers in it but those of two inputs' linear layers, and nobody else has replaced its forward."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    tensors += [tensor for child in others(module, packs) for tensor in (*child.parameters(), *child.buffers())]
    own = all(isinstance(pack.packed, OwnPacked) for pack in packs)
    return own and not tensors and "forward" not in vars(module) and len(packs[1].modules) == 1


def _runs(layers: list[nn.Module], succession: Succession) -> list[list[nn.Module]]:
    """Two and more layers that can be computed by one call."""
    forms = [_form(module) for module in layers]
    runs = [layers[:1]]
    for i in range(1, len(layers)):
        if succession.follows[i - 1] and forms[i] is not None and forms[i] == forms[i - 1]:
            runs[-1].append(layers[i])
        else:
            runs.append([layers[i]])
    return [run for run in runs if len(run) > 1]


def _form(module: nn.Module) -> tuple[object, ...] | None:
    """See FusedLayer.form; None where there is no such layer, or its norms differ."""
    fused = vars(module).get("forward")
    if not isinstance(fused, FusedLayer) or fused.first.numbers[1:] != fused.second.numbers[1:]:
        return None
    return fused.form
