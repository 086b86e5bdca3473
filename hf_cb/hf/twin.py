"""The twin: the user's model as the engine runs it, without changing the user's.

A deep copy in which every parameter and buffer is already "copied" to itself: the module tree and the config are new objects,
the weights are the same tensors. In-place weight updates are seen at once and no memory is doubled.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_cb.hf.dispatched import TokensBeforeHead, is_dispatched, offloaded_modules, offloaded_tensors, tied_maps


def make_twin(model: nn.Module) -> nn.Module:
    """A copy of the module tree over the same weights, in eval mode."""
    memo: dict[int, Any] = {id(shared): shared for shared in (*shared_tensors(model), *merge_notes(model))}
    # What is loaded for a call of the twin is noted apart from what is loaded for the user's, and may be at the same time.
    memo |= {id(tied): {address: dict(where) for address, where in list(tied.items())} for tied in tied_maps(model)}
    # The patched `generate` is an attribute of the instance, and not the twin's business.
    memo[id(vars(model).get("generate"))] = None
    twin = copy.deepcopy(model, memo)
    vars(twin).pop("generate", None)
    for module in twin.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):  # untrue of packed rows, and it waits for the device
            vars(module)["warn_if_padding_and_no_attention_mask"] = _say_nothing
    return twin.eval()


def _say_nothing(*_: object, **__: object) -> None:
    pass


def set_attention(twin: nn.Module, implementation: str) -> None:
    """Set the attention implementation in every config object of the twin (models copy or nest them)."""
    for config in _configs(twin):
        config._attn_implementation = implementation


def _configs(model: nn.Module) -> Iterator[Any]:
    seen: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None and hasattr(config, "_attn_implementation"):
            seen.setdefault(id(config), config)
    yield from seen.values()


def _modules_that_write_buffers(model: nn.Module) -> Iterator[nn.Module]:
    """Rotary embeddings of type "dynamic" or "longrope" rewrite their frequencies in forward: those buffers must not be shared,
    or a long plain call would change the frequencies under the engine's feet."""
    return (module for module in model.modules() if rope_follows_length(module))


def rope_follows_length(module: nn.Module) -> bool:
    """Whether this rotary embedding's frequencies depend on the longest position in the batch."""
    kinds = vars(module).get("rope_type")
    names = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(name, str) and ("dynamic" in name or name == "longrope") for name in names)


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    """What a twin cannot follow by sharing. Two that match: the twin is as good as new.

    Weights changed in place leave it as it is; a module replaced or added, a hook, a parameter that is another object or
    moved to another dtype or device, do not, nor do plain values of a module, by which adapters are switched, say. Objects are
    told apart by weak references, of which Python keeps one per object: an id could be used again by something else, a strong
    reference would keep the user's model alive.
    """

    objects: tuple[object, ...]
    state: tuple[object, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Fingerprint:
        """Of the model as it is now: some two microseconds per module, which every call waits for."""
        modules = all_modules(model)
        offloaded = offloaded_modules(modules) if any("_hf_hook" in vars(module) for module in modules) else set()
        objects: list[object] = [weakref.ref(module) for module in modules]
        state: list[object] = []
        for module in modules:
            forward, kind = vars(module).get("forward"), type(module)
            if forward is not None:
                objects.append(weakref.ref(forward))
            # The class's forward can be exchanged, too; and children can move from one to another.
            state += (kind, kind.forward, len(module._forward_hooks), len(module._forward_pre_hooks), forward is not None)
            state.append(tuple([modules.get(child) for child in list(module._modules.values()) if child is not None]))
            # Those keep books of what they have seen; and most of torch's own layers are what they are.
            keeps_books = "rope_type" in vars(module) and rope_follows_length(module)
            if not keeps_books and kind not in _WITHOUT_VALUES:
                state += _plain_values(module, containers=module is not model)
            if module in offloaded:
                continue
            # Buffers that the module itself replaces as it runs are not shared, and tell nothing.
            for tensor in (*list(module._parameters.values()), *([] if keeps_books else list(module._buffers.values()))):
                if tensor is not None:
                    objects.append(weakref.ref(tensor))
                    state += (tensor.dtype, tensor.device, tensor.shape)
        return cls(tuple(objects), tuple(state))

    def matches(self, other: Fingerprint) -> bool:
        """Whether both are of the same objects in the same state."""
        if len(self.objects) != len(other.objects) or self.state != other.state:
            return False
        return all(a is b for a, b in zip(self.objects, other.objects, strict=True))


_OF_EVERY_MODULE = frozenset((*vars(nn.Module()), "_previous_max_cache_length"))  # the latter, every call with a static cache
_PLAIN = frozenset((bool, int, float, str, type(None)))
_CONTAINERS = frozenset((list, tuple, set, dict))
_MOST_VALUES = 256  # in a container
_WITHOUT_VALUES = frozenset((nn.Linear, nn.Embedding, nn.ModuleList))


def _plain_values(module: nn.Module, containers: bool) -> list[tuple[str, object]]:
    """The module's own numbers, switches and names; with `containers`, small lists and dicts of such too."""
    own = [item for item in list(vars(module).items()) if item[0] not in _OF_EVERY_MODULE]  # others may be adding some
    values: list[tuple[str, object]] = [item for item in own if type(item[1]) in _PLAIN]
    if containers:
        for name, value in own:
            if type(value) in _CONTAINERS and len(value) <= _MOST_VALUES:
                parts = [*value.keys(), *value.values()] if type(value) is dict else value
                if all(type(part) in _PLAIN for part in parts):
                    values.append((name, tuple(parts)))
    return values


def all_modules(model: nn.Module) -> dict[nn.Module, int]:
    """Those of `model.modules()`, in another order and much faster; each with its place in that."""
    found = {model: 0}
    pending = [model]
    while pending:
        for child in list(pending.pop()._modules.values()):
            if child is not None and child not in found:
                found[child] = len(found)
                pending.append(child)
    return found


_Dropout: Any = nn.modules.dropout._DropoutNd


def in_training(model: nn.Module) -> str | None:
    """What of the model is in training mode, so that its forward may draw; None: nothing."""
    if model.training:
        return "the model is in training mode"
    if any(module.training and isinstance(module, _Dropout) and module.p for module in all_modules(model)):
        return "a dropout layer is in training mode"
    return None


def shared_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers that a model and its twin have in common."""
    own = {id(buffer) for module in _modules_that_write_buffers(model) for buffer in module.buffers(recurse=False)}
    buffers = (buffer for buffer in model.buffers() if id(buffer) not in own)
    return [*model.parameters(), *buffers, *offloaded_tensors(model)]


def merge_notes(model: nn.Module) -> list[list[str]]:
    """PEFT's notes, in each of its layers, of which adapters the weights have in them: about the weights, and shared like them.

    With a copy, what was merged meanwhile would count twice; and a layer that undoes a merge in its forward, as those do whose
    adapters are switched off, would leave the user's model with a note that is no longer true.
    """
    notes = (vars(module).get("merged_adapters") for module in model.modules())
    return [note for note in notes if isinstance(note, list)]


def forward_of(twin: nn.Module) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """The twin as (input_ids [1, T], position_ids [1, T], logits_indices [n]) -> logits [n, vocab].

    None if it takes no position_ids.
    """
    accepted = inspect.signature(twin.forward).parameters
    if "position_ids" not in accepted:
        return None
    keeps = "logits_to_keep" in accepted
    if keeps and is_dispatched(twin) and (head := twin.get_output_embeddings()) is not None:  # type: ignore[operator]
        return _selecting(twin, TokensBeforeHead(head))

    def forward(input_ids: torch.Tensor, position_ids: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        select = {"logits_to_keep": logits_indices} if keeps else {}
        # Eager is called through __call__ so that hooks (accelerate's device hooks) run.
        logits = twin(input_ids=input_ids, position_ids=position_ids, use_cache=False, return_dict=True, **select).logits[0]
        return logits if keeps else logits[logits_indices]  # type: ignore[no-any-return]

    return forward


def _selecting(
    twin: nn.Module, before_head: TokensBeforeHead
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    def forward(input_ids: torch.Tensor, position_ids: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        before_head.indices = logits_indices
        try:
            out = twin(input_ids=input_ids, position_ids=position_ids, use_cache=False, return_dict=True)
        finally:
            before_head.indices = None
        return out.logits[0]  # type: ignore[no-any-return]

    return forward
