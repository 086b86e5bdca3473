"""The seam to `generate()`: which calls the engine serves, and how one is turned into requests and back into a result.

transformers runs its own preamble first (merged config, inputs, processors, criteria) and hands over through `custom_generate`:
no merging rule is written twice here, and a call that goes native is the original call to the letter.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from hf_cb.engine import Engine
from hf_cb.errors import HFCBError, InvalidArgumentError
from hf_cb.handle import GenerationHandle
from hf_cb.hf.fates import FATES
from hf_cb.options import Defaults, check_seed
from hf_cb.request import Request, SamplingParams, Service

_CONFIG_FIELDS = frozenset(vars(GenerationConfig()))
# Arguments of generate() that are not fields of the config, and that the engine understands or transformers' preamble handles.
_KNOWN_ARGUMENTS = frozenset(
    {
        "inputs",
        "input_ids",
        "attention_mask",
        "generation_config",
        "logits_processor",
        "stopping_criteria",
        "streamer",
        "use_cache",
    }
)
# Fields that transformers' preamble can only handle with arguments that it does not pass on to a custom decoding function.
_NEED_THE_TOKENIZER = ("stop_strings", "token_healing")


# What the fields that run natively hold where they do nothing. (What needs another one to do something is off by itself.)
_OFF: tuple[Any, ...] = (None, False, 0, 1, [], {}, "")


class GoNativeError(Exception):
    """Raised inside the seam: this call runs natively. The message is the reason."""


def why_native(model: Any, arguments: Mapping[str, Any]) -> str | None:
    """The reason why a call with these arguments must run natively, as far as it can be told before transformers' preamble."""
    if model.training:
        return "the model is in training mode"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is on in the calling thread"
    for name, value in arguments.items():
        if name in _KNOWN_ARGUMENTS or name in _CONFIG_FIELDS or value is None:
            continue
        if name == "synced_gpus" and not value:
            continue
        return f"argument {name}"
    for name in _NEED_THE_TOKENIZER:
        if _effective(model, arguments, name):
            return f"option {name}"
    if (cache := _effective(model, arguments, "cache_implementation")) in ("quantized", "paged"):
        return f"option cache_implementation={cache!r}: another result"
    if arguments.get("cache_implementation") == "paged":
        return "option cache_implementation='paged'"  # transformers leaves for its own batching before the preamble
    return None


def _effective(model: Any, arguments: Mapping[str, Any], name: str) -> Any:
    for source in (arguments.get(name), getattr(arguments.get("generation_config"), name, None)):
        if source is not None:
            return source
    return getattr(model.generation_config, name, None)


def call_arguments(original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, whichever way they were given."""
    parameters = inspect.signature(original).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):  # a wrapper that passes everything on
        names = [name for name in inspect.signature(GenerationMixin.generate).parameters if name not in ("self", "kwargs")]
    if len(args) > len(names):
        raise TypeError(f"generate() takes at most {len(names)} positional arguments; got {len(args)}")
    given = dict(zip(names, args, strict=False))
    for name in kwargs:
        if name in given:
            raise TypeError(f"generate() got multiple values for argument {name!r}")
    return {**given, **kwargs}


class _PromptRecorder(BaseStreamer):
    """Stands in for the caller's streamer during the preamble, so that a call that goes native after all starts afresh."""

    def __init__(self) -> None:
        self.prompt: torch.Tensor | None = None

    def put(self, value: torch.Tensor) -> None:
        self.prompt = value

    def end(self) -> None:
        """Never reached: the preamble only puts the prompt."""


def generate(
    engine: Engine, original: Callable[..., Any], arguments: dict[str, Any], seed: int | None, service: Service
) -> Any:
    """Run one call through the engine. Raises GoNativeError if the merged options turn out to need plain generate."""
    streamer: BaseStreamer | None = arguments.get("streamer")
    recorder = _PromptRecorder() if streamer is not None else None

    def decode(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        call = _Call(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs.get("attention_mask"))
        deadline = service.deadline()
        requests = [replace(request, service=service, deadline=deadline) for request in _requests(engine, call, seed)]
        return _run(engine, call, requests, streamer, recorder.prompt if recorder else None)

    return original(**{**arguments, "streamer": recorder, "custom_generate": decode})


@dataclass(frozen=True, slots=True)
class _Call:
    """A call after the preamble."""

    input_ids: torch.Tensor  # [B, T], left-padded
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    attention_mask: torch.Tensor | None  # [B, T], None: all ones


def _requests(engine: Engine, call: _Call, seed: int | None) -> list[Request]:
    """One request per row, checked against the model and the pool. Raises GoNativeError or InvalidArgumentError."""
    config = call.config
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise GoNativeError(f"generation mode {mode.value}")
    if config.return_dict_in_generate:
        for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
            if getattr(config, name, None):
                raise GoNativeError(f"option {name}")
    if call.input_ids.numel() == 0:
        raise InvalidArgumentError(f"input_ids: takes at least one row of at least one token; got {list(call.input_ids.shape)}")
    max_new_tokens, eos = _stopping(call)
    params = _sampling(call, eos)
    served = engine.served()
    if params.do_sample and seed is None:
        seed = served.draw_seed()
    requests = [
        Request(prompt, max_new_tokens, eos, replace(params, seed=check_seed((seed or 0) + i)))
        for i, prompt in enumerate(_prompts(call))
    ]
    for request in requests:
        limit = served.max_positions
        if limit is not None and request.max_tokens > limit and (len(request.prompt) <= limit or served.stretches):
            # Plain generate may go past the model's positions, or stop before it gets there; only it knows.
            raise GoNativeError(f"prompt and max_new_tokens together exceed the {limit} positions that rows can share")
        engine.check(request)
    return requests


def _sampling(call: _Call, eos: frozenset[int]) -> SamplingParams:
    """The processors that transformers made, as our parameters; GoNativeError for one that we have no form of."""
    found: dict[str, Any] = {"do_sample": bool(call.config.do_sample), "min_new_tokens": 0}
    usual_order = iter(("min_new_tokens", "temperature", "top_k", "top_p"))
    latest = next(usual_order)
    for processor in call.processors:
        name, value = _parameter(processor, call.input_ids.shape[1], eos)
        while latest != name:
            latest = next(usual_order, "")
            if not latest:
                raise GoNativeError(f"logits processor {type(processor).__name__} out of the usual order")
        if name in found and name != "min_new_tokens":
            raise GoNativeError(f"two logits processors {type(processor).__name__}")
        found[name] = max(found["min_new_tokens"], value) if name == "min_new_tokens" else value
    return SamplingParams(**found)


def _parameter(processor: Any, prompt_length: int, eos: frozenset[int]) -> tuple[str, Any]:
    kind = type(processor)
    if kind in (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor):
        if frozenset(processor.eos_token_id.flatten().tolist()) == eos:
            # min_length counts the prompt, its padding included.
            is_total = kind is MinLengthLogitsProcessor
            least = processor.min_length if is_total else processor.prompt_length_to_skip + processor.min_new_tokens
            return "min_new_tokens", least - prompt_length
    elif getattr(processor, "filter_value", -math.inf) == -math.inf:
        if kind is TemperatureLogitsWarper:
            return "temperature", processor.temperature
        if kind is TopKLogitsWarper:
            return "top_k", processor.top_k
        if kind is TopPLogitsWarper and processor.min_tokens_to_keep == 1:
            return "top_p", processor.top_p
    raise GoNativeError(f"logits processor {kind.__name__}")


def _stopping(call: _Call) -> tuple[int, frozenset[int]]:
    lengths, eos = [], set[int]()
    for criterion in call.criteria:  # the first that is met counts
        if type(criterion) is MaxLengthCriteria:
            lengths.append(criterion.max_length - call.input_ids.shape[1])
        elif type(criterion) is EosTokenCriteria:
            eos.update(criterion.eos_token_id.flatten().tolist())
        else:
            raise GoNativeError(f"stopping criterion {type(criterion).__name__}")
    if not lengths:
        raise GoNativeError("no limit on the length")
    return max(1, min(lengths)), frozenset(eos)  # plain generate looks at the criteria after a token, not before


def _prompts(call: _Call) -> list[tuple[int, ...]]:
    """Each row without its left padding. A mask with a hole, or with padding on the right, is plain generate's business."""
    ids = call.input_ids.tolist()
    if call.attention_mask is None:
        return [tuple(row) for row in ids]
    mask = call.attention_mask
    if mask.shape != call.input_ids.shape:
        raise GoNativeError("an attention mask of another shape than the ids")
    kept = mask != 0
    if not torch.equal(kept.to(mask.dtype), mask):
        raise GoNativeError("an attention mask with values other than 0 and 1")
    if not bool((kept[:, -1] & (kept.int().diff(dim=1) >= 0).all(dim=1)).all()):
        raise GoNativeError("an attention mask with a hole or with padding on the right")
    return [tuple(row[len(row) - n :]) for row, n in zip(ids, kept.sum(dim=1).tolist(), strict=True)]


def _run(
    engine: Engine, call: _Call, requests: list[Request], streamer: BaseStreamer | None, prompt: torch.Tensor | None
) -> Any:
    handles = engine.submit_all(requests)
    pad = call.config._pad_token_tensor
    pad_token = int(pad) if pad is not None else 0
    try:
        if streamer is not None:
            streamer.put(prompt)
            _stream(handles, pad_token, streamer)
        rows = [handle.result().tokens for handle in handles]
    except BaseException as error:
        for handle in handles:
            handle.cancel()
        if streamer is not None and isinstance(error, HFCBError):
            streamer.end()  # who reads it on another thread must not wait for ever; the error is this caller's
        raise
    new = torch.full((len(rows), max(map(len, rows))), pad_token)
    for i, row in enumerate(rows):
        new[i, : len(row)] = torch.tensor(row)
    sequences: Any = torch.cat([call.input_ids, new.to(call.input_ids.device)], dim=1)
    return GenerateDecoderOnlyOutput(sequences=sequences) if call.config.return_dict_in_generate else sequences


def _stream(handles: list[GenerationHandle], pad_token: int, streamer: BaseStreamer) -> None:
    """As plain generate does: one `put` per step with a token for every row, pad for those that have ended."""
    iterators = [iter(handle) for handle in handles]
    while True:
        tokens = [next(iterator, None) for iterator in iterators]
        if all(token is None for token in tokens):
            break
        streamer.put(torch.tensor([pad_token if token is None else token for token in tokens]))
    streamer.end()


def defaults_of(config: GenerationConfig, max_positions: int | None) -> Defaults:
    """What `Engine.submit` takes from a model's generation config."""
    eos = config.eos_token_id
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]

    def value(name: str, otherwise: Any) -> Any:
        found = getattr(config, name, None)
        return otherwise if found is None else found

    sampling = SamplingParams(
        do_sample=bool(config.do_sample),
        temperature=float(value("temperature", 1.0)),
        top_k=int(value("top_k", 50)),
        top_p=float(value("top_p", 1.0)),
        min_new_tokens=int(value("min_new_tokens", 0)),
    )
    unserved = tuple(name for name, fate in FATES.items() if fate.where == "native" and getattr(config, name, None) not in _OFF)
    if getattr(config, "min_length", None):
        unserved = ("min_length", *unserved)  # it counts the prompt, which `min_new_tokens` does not
    return Defaults(config.max_new_tokens, config.max_length, max_positions, frozenset(ids), sampling, unserved)
