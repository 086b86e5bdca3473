"""The twin: the user's model as the engine runs it, without changing the user's.

A deep copy in which every parameter and buffer is already "copied" to itself: the module tree and the config are new objects,
the weights are the same tensors. In-place weight updates are seen at once and no memory is doubled.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hf_cb.hf.twins.dispatched import TokensBeforeHead, is_dispatched, offloaded_tensors, tied_maps
from hf_cb.hf.twins.forwards import follow_compiled
from hf_cb.hf.twins.held import OF_GENERATE, Reading


def make_twin(model: nn.Module) -> nn.Module:
    """A copy of the module tree over the same weights, in eval mode."""
    memo: dict[int, Any] = {id(shared): shared for shared in (*shared_tensors(model), *merge_notes(model))}
    # What is loaded for a call of the twin is noted apart from what is loaded for the user's, and may be at the same time.
    memo |= {id(tied): {address: dict(where) for address, where in list(tied.items())} for tied in tied_maps(model)}
    # A tensor that autograd has made can't be copied with its history.
    memo |= {id(tensor): tensor.detach().clone() for tensor in read_all(model).tensors if not tensor.is_leaf}
    # The patched `generate` is an attribute of the instance, and not the twin's business.
    memo[id(vars(model).get("generate"))] = None
    twin = copy.deepcopy(model, memo)
    vars(twin).pop("generate", None)
    follow_compiled({module: memo[id(module)] for module in model.modules() if id(module) in memo})
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


def read_all(model: nn.Module) -> Reading:
    """A look at all that the modules hold."""
    modules = all_modules(model)
    reading = Reading(modules)
    for module in modules:
        reading.values(module, OF_GENERATE if module is model else None)
    return reading


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


def forward_of(twin: nn.Module) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """The twin as (input_ids [1, T], position_ids [1, T], logits_indices [n]) -> logits [n, vocab]. One that takes no positions
    is not told them: its layers may keep states, and need none."""
    accepted = inspect.signature(twin.forward).parameters
    keeps, counts = "logits_to_keep" in accepted, "position_ids" in accepted
    if keeps and is_dispatched(twin) and (head := twin.get_output_embeddings()) is not None:  # type: ignore[operator]
        return _selecting(twin, TokensBeforeHead(head))

    def forward(input_ids: torch.Tensor, position_ids: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        options = {"logits_to_keep": logits_indices} if keeps else {}
        if counts:
            options["position_ids"] = position_ids
        # Eager is called through __call__ so that hooks (accelerate's device hooks) run.
        logits = twin(input_ids=input_ids, use_cache=False, return_dict=True, **options).logits[0]
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
