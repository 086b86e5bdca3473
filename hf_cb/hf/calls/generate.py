"""The seam to `generate()`: which calls the engine serves, and how one is turned into requests and back into a result.

transformers runs its own preamble first (merged config, inputs, processors, criteria) and hands over through `custom_generate`:
no merging rule is written twice here, and a call that goes native is the original call to the letter.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from hf_cb.errors import HFCBError, InvalidArgumentError, RequestFailedError, RequestTooLongError
from hf_cb.handle import GenerationHandle
from hf_cb.hf.calls import background
from hf_cb.hf.calls.beam_search import BeamSearch
from hf_cb.hf.calls.beams import beam_output, beam_requests
from hf_cb.hf.calls.call import Call, Stopping
from hf_cb.hf.calls.company import Company, joined
from hf_cb.hf.calls.native import effective
from hf_cb.hf.calls.option_table import HANDLING, does_something, has_no_form_for_submit
from hf_cb.hf.calls.result_cache import NAMES, Origin, kept_cache
from hf_cb.hf.calls.rules import Ends, GoNativeError, OwnRules, Part, criteria_of_row, processors_of
from hf_cb.hf.calls.sampling import PromptShape, split
from hf_cb.hf.calls.tokenizing import stop_string_criterion
from hf_cb.intake import Intake
from hf_cb.options import Defaults, check_seed
from hf_cb.request import Request, SamplingParams, Service
from hf_cb.sampling_options import params_of_config
from hf_cb.values import ids_of

_BEAMS = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, *_BEAMS)


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
    intake: Intake,
    model: Any,
    origin: Callable[[], Origin],
    original: Callable[..., Any],
    arguments: dict[str, Any],
    seed: int | None,
    service: Service,
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
        if streamer is not None and generation_config.get_generation_mode() in _BEAMS:
            raise GoNativeError("a streamer beside beams")  # plain generate has an error for it
        mask = model_kwargs.get("attention_mask")
        positions = None if arguments.get("position_ids") is None else model_kwargs["position_ids"]
        is_callers = any(arguments.get(name) is not None for name in NAMES)
        kept = kept_cache(input_ids, mask, positions, generation_config, model_kwargs, is_callers, origin)
        call = Call(input_ids, logits_processor, stopping_criteria, generation_config, mask, kept)
        if positions is not None:
            _check_positions(model, call, positions)
        deadline = service.deadline()
        requests = [replace(request, service=service, deadline=deadline) for request in _requests(intake, call, seed)]
        return _run(intake, call, requests, streamer, recorder.prompt if recorder else None)

    return original(**{**with_stop_strings(model, arguments), "streamer": recorder, "custom_generate": decode})


def with_stop_strings(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the criterion in the place of the option: transformers passes no tokenizer on to `custom_generate`."""
    strings, tokenizer = effective(model, arguments, "stop_strings"), arguments.get("tokenizer")
    if strings is None or tokenizer is None:  # without a tokenizer the error is transformers' own
        return arguments
    criterion = stop_string_criterion(tokenizer, strings)
    criteria = StoppingCriteriaList([*(arguments.get("stopping_criteria") or ()), criterion])
    changed = {**arguments, "stopping_criteria": criteria, "stop_strings": None}
    config = arguments.get("generation_config")
    if config is not None and "stop_strings" not in arguments and model.generation_config.stop_strings is None:
        del changed["stop_strings"]  # beside a config, transformers warns of options
        changed["generation_config"] = copy.copy(config)
        changed["generation_config"].stop_strings = None
    return changed


def _check_positions(model: Any, call: Call, positions: torch.Tensor) -> None:
    """Raise GoNativeError for positions other than those that the mask gives."""
    prepare = getattr(model, "_prepare_position_ids_for_generation", None)  # what versions and models give by themselves
    want = None if prepare is None else prepare(call.input_ids, {"attention_mask": call.attention_mask})
    if want is not None and positions.shape == call.input_ids.shape and want.shape[1:] == positions.shape[1:]:
        same = positions == want
        if bool((same if call.attention_mask is None else same | (call.attention_mask == 0)).all()):
            return
    raise GoNativeError("position_ids other than the mask gives")


def _requests(intake: Intake, call: Call, seed: int | None) -> list[Request]:
    """One request per row, checked against the model and the pool. Raises GoNativeError or InvalidArgumentError."""
    mode = call.config.get_generation_mode()
    if mode not in _MODES:
        raise GoNativeError(f"generation mode {mode.value}")
    for name in ("output_attentions", "output_hidden_states"):
        if call.keeps(name):
            raise GoNativeError(f"option {name}")
    if call.input_ids.numel() == 0:
        raise InvalidArgumentError(f"input_ids: takes at least one row of at least one token; got {list(call.input_ids.shape)}")
    served = intake.served()
    if call.config.do_sample and seed is None:
        seed = served.draw_seed() if (own := background.current()) is None else own.seed
    make = beam_requests if mode in _BEAMS else _row_requests
    requests = make(call, seed or 0, served.vocab_size)
    end_together = _company_of(requests) is not None or (mode in _BEAMS and call.config.return_dict_in_generate)
    if end_together and sum(request.width for request in requests) > served.config.max_batch_size:
        # Those that run would go on and on for those that have no seat.
        raise GoNativeError("more rows that end together than run at a time")
    for request in requests:
        limit = served.max_positions
        if limit is not None and request.max_tokens > limit and (len(request.prompt) <= limit or served.goes_beyond_positions):
            # Plain generate may go past the model's positions, or stop before it gets there; only it knows.
            raise GoNativeError(f"prompt and max_new_tokens together exceed the {limit} positions that rows can share")
        _check(intake, request)
    return requests


def _check(intake: Intake, request: Request) -> None:
    try:
        intake.check(request)
    except RequestTooLongError as error:
        if request.width == 1:
            raise
        raise GoNativeError(str(error)) from None  # where one row would fit, its beams may not


def _row_requests(call: Call, seed: int, vocab_size: int) -> list[Request]:
    """One per row; the samples of one prompt fork from the first."""
    prompts, stopping = call.prompts(), call.stopping()
    eos, length = stopping.eos_token_ids, call.input_ids.shape[1]
    padding = tuple(length - len(prompt) for prompt in prompts)
    own, params = split(call.processors, bool(call.config.do_sample), PromptShape(length, padding, eos))
    company = _company(call, stopping)
    if company is not None:  # then the rules alone say what comes, and when a row ends
        own, params, eos = list(call.processors), SamplingParams(do_sample=bool(call.config.do_sample)), frozenset()
    requests: list[Request] = []
    samples, ends = call.rows_per_prompt, Ends(stopping.max_new_tokens, eos, vocab_size)
    for i, prompt in enumerate(prompts):
        first = i - i % samples
        requests.append(
            Request(
                prompt,
                stopping.max_new_tokens,
                eos,
                replace(params, seed=check_seed(seed + i)),
                rules=_rules(call, i, own, stopping.criteria, ends, company),
                fork_of=requests[first].request_id if first < i and prompt == prompts[first] else None,
            )
        )
    return requests


def _company(call: Call, stopping: Stopping) -> Company | None:
    """What the rows share if it shows in the result how long each goes on after its end."""
    num_rows, pad = len(call.input_ids), call.pad_token
    shows = call.keeps("output_scores") or call.keeps("output_logits") if call.has_eos else bool(stopping.criteria)
    if num_rows == 1 or not shows:
        return None
    if not call.has_eos:
        return Company(num_rows, None)
    if pad is None:
        raise GoNativeError("several rows with an end and without a pad token")  # plain generate has an error for it
    return Company(num_rows, pad)


def _rules(call: Call, row: int, own: list[Any], criteria: list[Any], ends: Ends, company: Company | None) -> OwnRules | None:
    """What the engine has no field for, for one row of the call: the first of its processors, criteria. None: nothing."""
    keep_scores, keep_logits = call.keeps("output_scores"), call.keeps("output_logits")
    if not (own or criteria or keep_scores or keep_logits):
        return None
    num_rows = len(call.input_ids)
    part = Part(slice(row, row + 1), row // call.rows_per_prompt)
    rest = call.processors[len(own) :] if own else []
    own_criteria = criteria_of_row(criteria, num_rows)
    return OwnRules(
        call.input_ids[row : row + 1],
        ends,
        call.surroundings,
        processors_of(own, part, is_whole=num_rows == 1),
        processors_of(rest, part, is_whole=num_rows == 1),
        own_criteria if company is None else call.criteria,
        keep_scores,
        keep_logits,
        company,
    )


def _run(
    intake: Intake, call: Call, requests: list[Request], streamer: BaseStreamer | None, prompt: torch.Tensor | None
) -> Any:
    pad_token = call.pad_token or 0
    handles = intake.submit(requests)
    try:
        if (own_call := background.current()) is not None:
            own_call.hold(handles)
        if streamer is not None:
            streamer.put(prompt)
            _stream(handles, pad_token, streamer, _company_of(requests))
        rows = [handle.result().tokens for handle in handles]
    except BaseException as error:
        for handle in handles:
            handle.cancel()
        if streamer is not None and isinstance(error, HFCBError):
            streamer.end()  # who reads it on another thread must not wait for ever; the error is this caller's
        own = _own_error(requests) if isinstance(error, RequestFailedError) else None
        if own is None:
            raise
    else:
        return _output(call, requests, rows, pad_token)
    finally:
        call.surroundings.bring_back()
    raise own


def _output(call: Call, requests: list[Request], rows: list[tuple[int, ...]], pad_token: int) -> Any:
    """What plain generate returns: sequences [B, n], or an output object with them."""
    searches = [request.search for request in requests if isinstance(request.search, BeamSearch)]
    if searches:
        return beam_output(call, searches)
    kept = [request.rules for request in requests if isinstance(request.rules, OwnRules)]
    num_steps = max(map(len, rows)) if (company := _company_of(requests)) is None else company.num_steps
    new = torch.full((len(rows), num_steps), pad_token, dtype=torch.int64, device="cpu")
    for i, row in enumerate(rows):
        new[i, : len(row)] = torch.tensor(row[:num_steps], dtype=torch.int64, device="cpu")
    sequences: Any = torch.cat([call.input_ids, new.to(call.input_ids.device)], dim=1)
    cache = call.keep(sequences)
    if not call.config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=joined([rules.scores for rules in kept], num_steps),
        logits=joined([rules.logits for rules in kept], num_steps),
        **cache,
    )


def _company_of(requests: list[Request]) -> Company | None:
    rules = requests[0].rules
    return rules.company if isinstance(rules, OwnRules) else None


def _own_error(requests: list[Request]) -> BaseException | None:
    """What a processor or criterion of the caller's raised, which plain generate raises as it is."""
    own = (request.search or request.rules for request in requests)
    errors = (rules.error for rules in own if isinstance(rules, (OwnRules, BeamSearch)))
    return next((error for error in errors if error is not None), None)


def _stream(handles: list[GenerationHandle], pad_token: int, streamer: BaseStreamer, company: Company | None) -> None:
    """As plain generate does: one `put` per step with a token for every row, pad for those that have ended."""
    iterators = [iter(handle) for handle in handles]
    for step in itertools.count(1):
        tokens = [next(iterator, None) for iterator in iterators]
        is_beyond = company is not None and company.is_over and step > company.num_steps
        if is_beyond or all(token is None for token in tokens):
            break
        streamer.put(torch.tensor([pad_token if token is None else token for token in tokens], dtype=torch.int64, device="cpu"))
    streamer.end()


def defaults_of(config: GenerationConfig, max_positions: int | None) -> Defaults:
    """What `Engine.submit` takes from a model's generation config."""
    eos = ids_of("eos_token_id", config.eos_token_id)

    set_here = (name for name in HANDLING if does_something(name, getattr(config, name, None)))
    unserved = tuple(name for name in set_here if has_no_form_for_submit(name))
    return Defaults(config.max_new_tokens, config.max_length, max_positions, eos, params_of_config(config), unserved)
