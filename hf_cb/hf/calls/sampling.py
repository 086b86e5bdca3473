"""The logits processors of a call, as transformers made them: those that the engine has a field for, and the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.logits_process import (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_cb.errors import InvalidArgumentError
from hf_cb.hf.calls.rules import GoNativeError
from hf_cb.request import SamplingParams
from hf_cb.sampling_options import SAMPLING, check_sampling

_Parameter = tuple[str, Any]
_ORDER = tuple(option.name for option in SAMPLING)
"""The order in which the engine applies its fields; transformers' is the same."""


@dataclass(frozen=True, slots=True)
class PromptShape:
    """What the meaning of a processor depends on."""

    length: int  # of the rows of a call, padding included
    padding: tuple[int, ...]  # of each row, on its left
    eos_token_ids: frozenset[int]


def split(processors: Sequence[Any], do_sample: bool, prompts: PromptShape) -> tuple[list[Any], SamplingParams]:
    """(processors to run as they are, fields to apply after them) that together are `processors`, in their order.

    From the last one backwards, processors become fields for as long as each has one and they stand in the engine's order.
    Raises GoNativeError where a field has a value that the engine does not take.
    """
    found: dict[str, Any] = {}
    first, rank = len(processors), len(_ORDER)
    while first > 0:
        parameter = _parameter(processors[first - 1], do_sample, prompts)
        if parameter is None:
            break
        name, value = parameter
        repeats = name == "min_new_tokens" and name in found  # min_length stands before min_new_tokens: the longer one counts
        if _ORDER.index(name) >= rank and not repeats:
            break
        found[name] = max(found[name], value) if repeats else value
        rank = _ORDER.index(name)
        first -= 1
    params = SamplingParams(do_sample=do_sample, **found)
    return list(processors[:first]), _checked(params) if found else params


def _checked(params: SamplingParams) -> SamplingParams:
    """What transformers takes and the engine does not, plain generate knows: infinities, numbers of odd types."""
    try:
        return check_sampling(params)
    except InvalidArgumentError as error:
        raise GoNativeError(f"option {str(error).partition(':')[0]} has a value of another kind") from None


def _parameter(processor: Any, do_sample: bool, prompts: PromptShape) -> _Parameter | None:
    kind = type(processor)
    if kind in (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor):
        return _least_length(processor, prompts)
    if kind is RepetitionPenaltyLogitsProcessor:
        ignored = processor.prompt_ignore_length
        skips = tuple(ignored.tolist()) if isinstance(ignored, torch.Tensor) else (ignored or 0,) * len(prompts.padding)
        return ("repetition_penalty", processor.penalty) if skips == prompts.padding else None
    if kind is SuppressTokensLogitsProcessor:
        return "suppress_tokens", tuple(processor.suppress_tokens.tolist())
    if kind is SuppressTokensAtBeginLogitsProcessor and processor.begin_index == prompts.length:
        return "begin_suppress_tokens", tuple(processor.begin_suppress_tokens.tolist())
    return _warper(processor) if do_sample else None


def _least_length(processor: Any, prompts: PromptShape) -> _Parameter | None:
    if frozenset(processor.eos_token_id.flatten().tolist()) != prompts.eos_token_ids:
        return None
    if type(processor) is MinLengthLogitsProcessor:
        least = processor.min_length  # it counts the prompt, its padding included
    else:
        least = processor.prompt_length_to_skip + processor.min_new_tokens
    return "min_new_tokens", max(0, least - prompts.length)


def _warper(processor: Any) -> _Parameter | None:
    kind = type(processor)
    if getattr(processor, "filter_value", -math.inf) != -math.inf:
        return None
    if kind is TemperatureLogitsWarper:
        return "temperature", processor.temperature
    if kind is TopKLogitsWarper:
        return "top_k", processor.top_k
    if kind is TopPLogitsWarper and processor.min_tokens_to_keep == 1:
        return "top_p", processor.top_p
    if kind is MinPLogitsWarper and processor.min_tokens_to_keep == 1:
        return "min_p", processor.min_p
    return None
