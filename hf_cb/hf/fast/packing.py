"""Linear layers of the twin over weights that are laid out once for products with few rows.

A plain product finds the weights in an order that is slow to read when there are few tokens. Here each weight is copied once
into the order in which it will be read (`products.py`), and layers that are given the same input (queries, keys and values;
gate and up) are joined into one product. Which layers those are is seen in a pass of the model, not looked up by name. The
twin's modules stay what they are, with their weights: only their `forward` is another one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_cb.hf.fast.products import OwnPacked, Products, products_for
from hf_cb.hf.twins.forwards import replaced

logger = logging.getLogger("hf_cb")


LinearCall = tuple[nn.Module, torch.Tensor]
"""A linear layer that can be packed, and the input that it was given."""


@contextlib.contextmanager
def linear_calls(model: nn.Module) -> Iterator[list[LinearCall]]:
    """The calls made inside, in their order."""
    calls: list[LinearCall] = []

    def forward(module: nn.Module, x: torch.Tensor) -> Any:
        if x.dtype == module.weight.dtype:
            calls.append((module, x))
        return type(module).forward(module, x)

    with replaced({module: functools.partial(forward, module) for module in model.modules() if _can_pack(module)}):
        yield calls


def group_by_input(calls: Iterable[LinearCall]) -> list[list[nn.Module]]:
    """Each layer once, together with those that were given the same tensor. One that was called several times is by itself."""
    calls = list(calls)
    times = Counter(module for module, _ in calls)
    groups: dict[int, list[nn.Module]] = {}
    for module, x in calls:
        groups.setdefault(id(x) if times[module] == 1 else id(module), []).append(module)
    return [list(dict.fromkeys(group)) for group in groups.values()]


class Packs:
    """The packed weights of a twin, as many as a memory limit allows, first come first served."""

    def __init__(self, groups: Iterable[list[nn.Module]] = (), limit: int = 0) -> None:
        """Puts another forward into the modules in `groups`. `limit` in bytes."""
        self.num_bytes = 0
        self._packs: list[Pack] = []
        try:
            for modules in groups:
                products = products_for(_weight(modules[0]).dtype)
                size = sum(_weight(module).nbytes for module in modules)
                if products is not None and self.num_bytes + size <= limit:
                    self.num_bytes += size
                    self._packs.append(Pack(modules, products))
        except RuntimeError:  # no memory
            self.undo()
            raise
        self._copies = [(tensor, pack) for pack in self._packs for tensor in pack.sources()]

    def of(self, *modules: nn.Module) -> Pack | None:
        """The pack of exactly these layers, in the order in which they are called."""
        return next((pack for pack in self._packs if pack.modules == [*modules]), None)

    def repack(self, changed: Iterable[torch.Tensor] | None = None) -> None:
        """Copy these again, as far as there are copies of them; all of them by default."""
        ids = None if changed is None else set(map(id, changed))
        if ids is not None and not ids:  # as nearly always
            return
        for pack in dict.fromkeys(pack for tensor, pack in self._copies if ids is None or id(tensor) in ids):
            try:
                pack.load()
            except RuntimeError:  # torch's out-of-memory error on a CPU, too
                logger.warning("a changed weight could not be packed again: its layer runs without", exc_info=True)
                pack.undo()

    def undo(self) -> None:
        """Give the modules their own forward back."""
        for pack in self._packs:
            pack.undo()


class Pack:
    """One product for the layers of a group. The first to be called computes it for all, the others fetch their part."""

    def __init__(self, modules: list[nn.Module], products: Products) -> None:
        self.modules = modules
        self.users: list[
            Callable[[], object]
        ] = []  # how those are undone who compute with what is packed, in the order in which they came
        self._products = products
        self._input: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()
        self.load()
        vars(modules[0])["forward"] = self.product if len(modules) == 1 else self._first
        for i in range(1, len(modules)):
            vars(modules[i])["forward"] = functools.partial(self._other, i)

    def sources(self) -> list[torch.Tensor]:
        """The tensors that the pack is a copy of."""
        return [
            tensor for module in self.modules for tensor in (module.weight, module.bias) if isinstance(tensor, torch.Tensor)
        ]

    def load(self) -> None:
        """Copy the weights as they are now."""
        weights = [_weight(module) for module in self.modules]
        self.widths = [len(weight) for weight in weights]
        joined = torch.cat(weights) if len(weights) > 1 else weights[0].contiguous()
        self.packed = self._products.pack(joined, _joined_bias(self.modules, weights))

    def undo(self) -> None:
        """Leave the modules to their own forward; undoing twice is fine."""
        for undo in reversed(self.users):
            undo()
        for module in self.modules:
            vars(module).pop("forward", None)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., sum of widths]."""
        return self.packed.product(x)

    def own(self) -> OwnPacked:
        """What is packed, where our own kernels compute with it."""
        assert isinstance(self.packed, OwnPacked)
        return self.packed

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        self._input, self._parts = x, self.product(x).split(self.widths, -1)
        return self._parts[0]

    def _other(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if x is not self._input:  # not in the order that was seen: the layer's own product is as right
            module = self.modules[index]
            return type(module).forward(module, x)  # type: ignore[no-any-return]
        part = self._parts[index]
        if index == len(self.modules) - 1:  # nobody else will ask: thousands of tokens in every layer are a lot to keep
            self._input, self._parts = None, ()
        return part


def _can_pack(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return (
        type(module) in (nn.Linear, Conv1D)
        and "forward" not in vars(module)  # as of accelerate's hooks
        and weight is not None
        and type(weight.data) is torch.Tensor  # quantised and distributed weights are of other classes
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and products_for(weight.dtype) is not None
    )


def _weight(module: nn.Module) -> torch.Tensor:
    """[out, in]."""
    weight = module.get_parameter("weight").detach()
    return weight.t() if isinstance(module, Conv1D) else weight


def _joined_bias(modules: list[nn.Module], weights: list[torch.Tensor]) -> torch.Tensor | None:
    biases: list[Any] = [module.bias for module in modules]
    if all(bias is None for bias in biases):
        return None
    parts = [w.new_zeros(len(w)) if b is None else b.detach() for w, b in zip(weights, biases, strict=True)]
    return torch.cat(parts)
