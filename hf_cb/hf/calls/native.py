"""Which calls must run natively, as far as it can be told before transformers' preamble."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.utils import GenerationMixin

from hf_cb.hf.calls.modes import mode_of_caller
from hf_cb.hf.calls.result_cache import NAMES, contents_of, is_blank
from hf_cb.hf.calls.surroundings import needs_callers_thread
from hf_cb.hf.twins.dispatched import device_of
from hf_cb.hf.twins.own_code import is_transformers
from hf_cb.hf.twins.twin import in_training

_CONFIG_FIELDS = frozenset(vars(GenerationConfig()))
# Arguments of generate() that are not fields of the config, and that the engine understands or transformers' preamble handles.
_KNOWN_ARGUMENTS = frozenset(
    {
        "inputs",
        "input_ids",
        "attention_mask",
        "generation_config",
        "logits_processor",
        "prefix_allowed_tokens_fn",
        "stopping_criteria",
        "streamer",
        "tokenizer",
        "use_cache",
        "position_ids",
    }
)


# What the preamble calls, and hands on whole; and what generate does not call.
_SERVED_METHODS = frozenset(
    {
        *("_get_logits_processor", "_get_stopping_criteria", "_merge_criteria_processor_list"),
        *("_validate_generation_mode", "_validate_model_kwargs", "_validate_generated_length"),
        *("compute_transition_scores", "output_modalities", "adjust_generation_fn", "load_custom_generate"),
        "_supports_default_dynamic_cache",
    }
)
_METHODS = frozenset(name for name in vars(GenerationMixin) if name not in _SERVED_METHODS and not name.startswith("__"))
_methods_of = operator.attrgetter(*_METHODS)
_found_good: set[tuple[Any, ...]] = set()  # all functions of transformers' classes, of which there are few


def why_native(model: Any, arguments: Mapping[str, Any], zeros_are_none: AbstractSet[str] = frozenset()) -> str | None:
    """The reason why a call with these arguments must run natively, as far as it can be told before transformers' preamble.

    `zeros_are_none`: arguments that the model may as well not be given where they are all zeros.
    """
    if (reason := in_training(model)) is not None:
        return reason
    device = model.device
    if device.type == "meta":  # all weights are offloaded
        device = device_of(model.get_input_embeddings())
    if torch.is_autocast_enabled(device.type):
        return "autocast is on in the calling thread"
    if (mode := mode_of_caller()) is not None:
        return f"{mode} is on in the calling thread"
    if (method := _own_method(model)) is not None:
        return f"{method} is not transformers' own"
    for name, value in arguments.items():
        if name in _KNOWN_ARGUMENTS or name in _CONFIG_FIELDS or value is None:
            continue
        if name == "synced_gpus" and not value:
            continue
        if name in NAMES and (contents_of(value) is not None or is_blank(value)):
            continue
        if name in NAMES:
            return "a cache that was looked into, or is none of a result's"
        if name in zeros_are_none and isinstance(value, torch.Tensor) and not value.any():
            continue
        return f"argument {name}"
    for name in ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"):
        if (bound := needs_callers_thread(arguments.get(name))) is not None:
            return f"{bound} needs its caller's thread"
    if effective(model, arguments, "token_healing"):
        return "option token_healing"  # needs the tokenizer, which transformers keeps from a custom decoding function
    if effective(model, arguments, "stop_strings") and any(
        isinstance(criterion, StopStringCriteria) for criterion in arguments.get("stopping_criteria") or ()
    ):
        return "option stop_strings beside a criterion of the same kind"
    if (cache := effective(model, arguments, "cache_implementation")) in ("quantized", "paged"):
        return f"option cache_implementation={cache!r}: another result"
    if arguments.get("cache_implementation") == "paged":
        return "option cache_implementation='paged'"  # transformers leaves for its own batching before the preamble
    return None


def _own_method(model: Any) -> str | None:
    """A method that plain generate calls, and that somebody has put in the place of transformers' own."""
    own = vars(model)
    if not _METHODS.isdisjoint(own):  # PEFT's prompt tuning, say, puts tokens of its own before the prompt
        for name in _METHODS.intersection(own) - {"generate"}:  # that is the engine's
            if getattr(own[name], "__func__", None) is not getattr(type(model), name):
                return name
    functions = _methods_of(type(model))
    if functions in _found_good:
        return None
    for name, function in zip(_METHODS, functions, strict=True):
        if not is_transformers(function):
            return name
    _found_good.add(functions)
    return None


def effective(model: Any, arguments: Mapping[str, Any], name: str) -> Any:
    """The value of an option that has one place in the call, one in its config and one in the model's."""
    if name in arguments:  # None too: it counts
        return arguments[name]
    given = getattr(arguments.get("generation_config"), name, None)
    return getattr(model.generation_config, name, None) if given is None else given
