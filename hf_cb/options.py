"""Options of a request as a caller gives them: validated and made into a Request."""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hf_cb.errors import InvalidArgumentError, UnsupportedCallError
from hf_cb.request import Request, SamplingParams, Service
from hf_cb.sampling_options import SAMPLING, check_sampling
from hf_cb.values import ids_of, is_int, is_number


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request takes from the model's own generation config where the caller says nothing."""

    max_new_tokens: int | None = None  # None: max_length decides
    max_length: int | None = None  # of prompt and output together; None: transformers' own default, _DEFAULT_NEW_TOKENS
    max_positions: int | None = None  # where that default ends early
    eos_token_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    unserved: tuple[str, ...] = ()  # options that are set there and that a request has no form of


_DEFAULT_NEW_TOKENS = 20
_SAMPLING = tuple(option.name for option in SAMPLING)
_SERVICE = ("priority", "tenant", "cache_salt", "timeout")
OPTIONS = ("max_new_tokens", "eos_token_id", *_SAMPLING, "seed", *_SERVICE, "logprobs", "prompt_logprobs")


def make_request(input_ids: Any, options: Mapping[str, Any], defaults: Defaults, draw_seed: Callable[[], int]) -> Request:
    """One prompt (ids of shape [n] or [1, n]) and its options as a Request. Raises InvalidArgumentError, naming the argument.

    `draw_seed` is called only for a request that samples and names no seed.
    """
    for name in options:
        if name not in OPTIONS:
            raise InvalidArgumentError(f"{name}: no such option of submit; it takes {', '.join(OPTIONS)}")
    if defaults.unserved:
        raise UnsupportedCallError(
            f"{defaults.unserved[0]}: set in the model's generation_config, and submit has no form of it; "
            f"model.generate() serves it"
        )
    prompt = tokenids_of(input_ids)
    max_new_tokens = options.get("max_new_tokens")
    if max_new_tokens is None:
        max_new_tokens = _default_new_tokens(len(prompt), defaults)
    if not is_int(max_new_tokens) or max_new_tokens < 1:
        raise InvalidArgumentError(f"max_new_tokens: takes an integer >= 1; got {max_new_tokens!r}")
    service = make_service({name: options[name] for name in _SERVICE if name in options})
    return Request(
        prompt=prompt,
        max_new_tokens=int(max_new_tokens),
        eos_token_ids=ids_of("eos_token_id", options["eos_token_id"]) if "eos_token_id" in options else defaults.eos_token_ids,
        sampling=_sampling(options, defaults.sampling, draw_seed),
        deadline=service.deadline(),
        service=service,
        logprobs=_count("logprobs", options),
        prompt_logprobs=_count("prompt_logprobs", options),
    )


def _count(name: str, options: Mapping[str, Any]) -> int | None:
    count = options.get(name)
    if count is not None and (not is_int(count) or count < 0):
        raise InvalidArgumentError(
            f"{name}: takes how many of the most probable tokens to report, an integer >= 0; got {count!r}"
        )
    return None if count is None else int(count)


def make_service(options: Mapping[str, Any]) -> Service:
    """`options` as a Service. Raises InvalidArgumentError, naming the argument."""
    service = Service(**{name: value for name, value in options.items() if value is not None})
    if not is_int(service.priority):
        raise InvalidArgumentError(f"priority: takes an integer, lower is sooner; got {service.priority!r}")
    for name in ("tenant", "cache_salt"):
        value = getattr(service, name)
        if value is not None and not isinstance(value, str):
            raise InvalidArgumentError(f"{name}: takes a string or None; got {value!r}")
    timeout = service.timeout
    if timeout is not None and not (is_number(timeout) and 0 < timeout <= threading.TIMEOUT_MAX):
        raise InvalidArgumentError(f"timeout: takes seconds > 0, at most {threading.TIMEOUT_MAX:.0f}, or None; got {timeout!r}")
    return service


def tokenids_of(input_ids: Any) -> tuple[int, ...]:
    """The ids of one prompt, from a sequence or a tensor of shape [n] or [1, n], n >= 1."""
    ids = input_ids.tolist() if hasattr(input_ids, "tolist") else input_ids
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        raise InvalidArgumentError(f"input_ids: takes one prompt's token ids; got {_named(input_ids)}")
    if len(ids) == 1 and isinstance(ids[0], Sequence) and not isinstance(ids[0], str):
        ids = ids[0]
    if not ids:
        raise InvalidArgumentError("input_ids: takes at least one token; got an empty prompt")
    if not all(map(is_int, ids)):
        raise InvalidArgumentError(f"input_ids: takes one prompt's token ids, which are integers; got {_named(ids)}")
    return tuple(map(int, ids))


def _named(prompt: Any) -> str:
    """What was given for token ids, and what to pass instead."""
    kind = type(prompt).__name__
    if isinstance(prompt, Mapping):
        return f"a {kind}: pass its ['input_ids']"
    if isinstance(prompt, str):
        return "a string: pass tokenizer(text)['input_ids']"
    if isinstance(prompt, Sequence) and any(isinstance(part, str) for part in prompt):
        return "strings: pass tokenizer(text)['input_ids'], several prompts to submit_batch"
    if isinstance(prompt, Sequence) and len(prompt) > 1 and all(isinstance(part, Sequence) for part in prompt):
        return f"{len(prompt)} rows: submit_batch takes several prompts"
    return reprlib.repr(prompt) if isinstance(prompt, Sequence) else kind


def _default_new_tokens(num_prompt_tokens: int, defaults: Defaults) -> int:
    """As transformers decides when a call names no length."""
    if defaults.max_new_tokens is not None:
        return defaults.max_new_tokens
    if defaults.max_length is None:
        room = _DEFAULT_NEW_TOKENS if defaults.max_positions is None else defaults.max_positions - num_prompt_tokens
        return max(1, min(_DEFAULT_NEW_TOKENS, room))
    if num_prompt_tokens >= defaults.max_length:
        raise InvalidArgumentError(
            f"max_new_tokens: the generation config's max_length is {defaults.max_length}, and the prompt has "
            f"{num_prompt_tokens} tokens already"
        )
    return defaults.max_length - num_prompt_tokens


def _sampling(options: Mapping[str, Any], defaults: SamplingParams, draw_seed: Callable[[], int]) -> SamplingParams:
    given = {name: options[name] for name in _SAMPLING if options.get(name) is not None}
    params = check_sampling(replace(defaults, **given))
    seed = options.get("seed")
    if seed is None:
        seed = draw_seed() if params.do_sample else 0
    return replace(params, seed=check_seed(seed))


def check_seed(seed: Any) -> int:
    """The seed if torch's generators take it, else InvalidArgumentError."""
    if not is_int(seed) or not 0 <= seed < 1 << 63:
        raise InvalidArgumentError(f"seed: takes an integer from 0 to 2**63 - 1; got {seed!r}")
    return int(seed)
