"""Models that accelerate has dispatched (`device_map`): layers on several devices, or weights that are loaded for each call.

Its hooks stand round each module's forward: they move what comes in to the module's device, load weights that are offloaded to
the CPU or the disk, and put placeholders in their place afterwards. The twin has hooks of its own, copied with it. They are
known here by their attributes, since accelerate need not be installed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


def _hooks(module: nn.Module) -> Iterator[Any]:
    """The hooks that say where the module runs."""
    pending = [vars(module).get("_hf_hook")]
    while pending:
        hook = pending.pop()
        pending += getattr(hook, "hooks", ())  # several in one
        if hasattr(hook, "execution_device"):
            yield hook


def is_dispatched(model: nn.Module) -> bool:
    """Whether accelerate's hooks decide where parts of the model run."""
    return any(True for module in model.modules() for _ in _hooks(module))


def device_of(module: nn.Module) -> torch.device:
    """Where a module with weights, or with parts that have them, runs, wherever those are meanwhile."""
    devices = [hook.execution_device for part in module.modules() for hook in _hooks(part)]
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((torch.device(device) for device in devices if device is not None), None) or next(tensors).device


def offloaded_modules(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Those whose tensors are other objects in a call than between two, and again in the next."""
    found: set[nn.Module] = set()
    for module in modules:
        for hook in _hooks(module):
            if getattr(hook, "offload", False):
                found.update(module.modules() if hook.place_submodules else (module,))
    return found


def offloaded_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The weights that wait in the host's memory; not those on the disk."""
    stores = (_store(getattr(hook, "weights_map", None)) for module in model.modules() for hook in _hooks(module))
    tensors = (tensor for store in {id(store): store for store in stores}.values() for tensor in store.values())
    return list({id(tensor): tensor for tensor in tensors if isinstance(tensor, torch.Tensor)}.values())


def _store(weights: object) -> Mapping[str, object]:
    """The dict behind accelerate's views of it, which add a prefix to the names, or look on the disk as well."""
    while hasattr(weights, "dataset"):
        weights = weights.dataset
    weights = getattr(weights, "state_dict", weights)
    return weights if isinstance(weights, dict) else {}


def tied_maps(model: nn.Module) -> list[dict[int, dict[Any, torch.Tensor]]]:
    """The hooks' notes of which tied weights are loaded where: address -> device -> tensor."""
    maps = (getattr(hook, "tied_params_map", None) for module in model.modules() for hook in _hooks(module))
    return list({id(found): found for found in maps if found is not None}.values())


class TokensBeforeHead:
    """Hands the head only the tokens whose logits are wanted, selected where they are.

    The model would do that itself (`logits_to_keep`). But accelerate moves arguments to the first device, and an index there is
    of no use to the last layers on another.
    """

    def __init__(self, head: nn.Module) -> None:
        self.indices: torch.Tensor | None = None  # [n]; None: all of them
        head.register_forward_pre_hook(self)

    def __call__(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The head's hidden states [1, T, hidden] -> [1, n, hidden]."""
        if self.indices is None:
            return None
        hidden, *others = args
        return (hidden[:, self.indices.to(hidden.device)], *others)
