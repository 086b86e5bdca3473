"""Logits processors and stopping criteria that the engine has no field for: run as they are, each row by itself.

plain generate calls them once a step with the whole batch, [batch, n] ids and [batch, vocab] scores. Here each row calls them
once per token of its own with [1, n] and [1, vocab], its padding included: what plain generate gives that row when it is alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import logits_process
from transformers.generation.logits_process import (
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.stopping_criteria import MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria

from hf_cb.hf.calls.company import Company
from hf_cb.hf.calls.surroundings import Surroundings


class GoNativeError(Exception):
    """Raised inside the seam: this call runs natively. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Where a row ends, whatever its own code says."""

    max_new_tokens: int
    eos_token_ids: frozenset[int]
    vocab_size: int  # of what the model can be given: it goes on from no other token


def no_such_token(token: int, vocab_size: int) -> IndexError:
    """What plain generate raises, too, when wider scores choose a token that the model can't go on from."""
    return IndexError(f"index out of range: the scores of a logits processor chose token {token}; the model has {vocab_size}")


_ROOM = 1024  # output tokens for which there is memory from the beginning: a limit may be far beyond what comes


class OwnRules:
    """One row's processors and criteria (`hf_cb.request.RowRules`), and what its caller wants to know of each token."""

    def __init__(
        self,
        row: torch.Tensor,
        ends: Ends,
        surroundings: Surroundings,
        processors: LogitsProcessorList,
        rest: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        keep_scores: bool = False,
        keep_logits: bool = False,
        company: Company | None = None,
    ) -> None:
        """`row`: [1, n] ids, its padding included. `rest`: of the processors, for which the request has fields. `company`: the
        rows that end together; then `criteria` are all there are."""
        self.company = company
        self._ends = ends
        self._num_prompt = self._length = row.shape[1]
        self._longest = self._length + ends.max_new_tokens
        self._has_ended = False
        self._ids = row
        self._make_room(min(ends.max_new_tokens, _ROOM))
        self._surroundings = surroundings
        self._processors = processors
        self._rest = rest
        self._criteria = criteria
        self.scores: tuple[torch.Tensor, ...] | None = () if keep_scores else None  # [1, vocab] each
        self.logits: tuple[torch.Tensor, ...] | None = () if keep_logits else None
        self._beyond: torch.Tensor | None = None  # the scores of a step after the row's end
        self.error: BaseException | None = None  # the caller's own, with its traceback

    def process(self, logits: Any) -> Any:
        """Scores [1, vocab] for the next token."""
        scores = self._own(self._process, logits)
        if not self._has_ended or self.company is None or self.company.pad_token is None:
            return scores
        self._beyond = scores  # what the result shows; the token is chosen by others
        padding = torch.full_like(logits, -torch.inf)
        padding[:, self.company.pad_token] = 0.0
        return padding

    def accept(self, token: int, scores: Any) -> bool:
        """Append the token and ask the criteria."""
        if self._length == self._ids.shape[1]:
            self._make_room(self._length)
        self._ids[0, self._length] = token
        self._length += 1
        is_stopped = self._own(self._accept, scores) if self._criteria or self.scores is not None else False
        is_last = is_stopped or token in self._ends.eos_token_ids or self._length == self._longest
        if token >= self._ends.vocab_size and not is_last:
            self._fail(error := no_such_token(token, self._ends.vocab_size))
            raise error
        return is_stopped

    def close(self) -> None:
        """The request has ended. If before its row did, the others of the call need not wait for that."""
        if self.company is not None and not self._has_ended:
            self.company.abandon()

    def _make_room(self, tokens: int) -> None:
        with torch.inference_mode(False):  # else no other thread could write into it
            self._ids = torch.nn.functional.pad(self._ids, (0, tokens))

    def _own(self, function: Callable[..., Any], tensor: Any) -> Any:
        try:
            return self._surroundings.run(function, tensor)
        except BaseException as error:  # SystemExit too is this caller's affair, not the engine's
            self._fail(error)
            raise

    def _process(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.to(self._ids.device, copy=True)
        if self.logits is not None:
            self.logits += (logits,)  # the tensor itself: as in plain generate, a processor that works in place shows here
        if not self._processors:
            return logits
        scores: torch.Tensor = self._processors(self._history(), logits)
        if scores.dim() != 2 or len(scores) != 1:
            raise ValueError(f"logits processors: plain generate takes scores of shape [1, n]; got {list(scores.shape)}")
        if scores.shape != logits.shape or scores.dtype != logits.dtype:
            return self._rest(self._history(), scores)
        return scores

    def _accept(self, scores: torch.Tensor) -> bool:
        if self.scores is not None:
            kept = scores if self._beyond is None else self._beyond
            self.scores += (kept.to(self._ids.device, copy=True),)
        is_met = bool(self._criteria and self._criteria(self._history(), self.scores).all())
        return is_met if self.company is None else self._ends_all(self.company, is_met)

    def _fail(self, error: BaseException) -> None:
        self.error = error

    def _ends_all(self, company: Company, is_met: bool) -> bool:
        num_steps = self._length - self._num_prompt
        if is_met and not self._has_ended:
            self._has_ended = True
            company.end(num_steps)
        return company.is_over and num_steps >= company.num_steps

    def _history(self) -> Any:
        """Prompt and output so far, [1, n]."""
        return self._ids[:, : self._length]


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a call that choose their tokens together: a single one, or the beams of a prompt."""

    rows: slice
    prompt: int

    @property
    def width(self) -> int:
        """How many rows choose together."""
        return int(self.rows.stop - self.rows.start)


def processors_of(processors: Iterable[Any], part: Part, is_whole: bool) -> LogitsProcessorList:
    """The processors as they are for one part of a call, or the whole of it. Raises GoNativeError for one that may mix rows of
    several parts, or calls the model."""
    found = LogitsProcessorList()
    for processor in processors:
        kind = type(processor)
        if kind is UnbatchedClassifierFreeGuidanceLogitsProcessor:
            raise GoNativeError(f"logits processor {kind.__name__} calls the model itself")
        if not is_whole:
            processor = _adapted(processor, part)
        found.append(processor)
    return found


def criteria_of_row(criteria: Iterable[Any], num_rows: int) -> StoppingCriteriaList:
    """The criteria as they are for one row of a call. Raises GoNativeError where rows would not be as if alone."""
    found = StoppingCriteriaList(criteria)
    if num_rows > 1 and found:
        for criterion in found:
            if type(criterion) not in (MaxTimeCriteria, StopStringCriteria):
                raise GoNativeError(f"stopping criterion {type(criterion).__name__} for several rows: it may look across them")
    return found


def _adapted(processor: Any, part: Part) -> Any:
    kind = type(processor)
    if kind in _ROW_BY_ROW:
        return processor
    adapt = _ADAPTED.get(kind)
    if adapt is not None:
        return adapt(processor, part)
    if getattr(processor, "supports_continuous_batching", None) is True:
        return processor  # it says so itself
    raise GoNativeError(f"logits processor {kind.__name__} for several rows: it may look across them")


def _repetition(processor: RepetitionPenaltyLogitsProcessor, part: Part) -> Any:
    ignored = processor.prompt_ignore_length
    if not isinstance(ignored, torch.Tensor):
        return processor
    return RepetitionPenaltyLogitsProcessor(processor.penalty, ignored[part.rows])


def _prefix(processor: PrefixConstrainedLogitsProcessor, part: Part) -> Any:
    allowed = processor._prefix_allowed_tokens_fn
    return PrefixConstrainedLogitsProcessor(lambda _, sentence: allowed(part.prompt, sentence), part.width)


def _encoder_ids(processor: Any, part: Part) -> Any:
    own = copy.copy(processor)
    prompt = slice(part.prompt, part.prompt + 1)
    if not hasattr(own, "encoder_input_ids"):
        own.batch_size, own.generated_ngrams = 1, own.generated_ngrams[prompt]
    elif part.width > 1:
        raise GoNativeError(f"logits processor {type(processor).__name__} for the beams of several prompts")
    else:
        own.encoder_input_ids = own.encoder_input_ids[prompt]
    return own


def _stateful(processor: Any, part: Part) -> Any:
    if processor.state is not None:
        raise GoNativeError(f"logits processor {type(processor).__name__} has begun with another batch")
    return copy.copy(processor)


def _known(*names: str) -> tuple[Any, ...]:
    """Those of transformers' processors that the installed version has."""
    return tuple(kind for name in names if (kind := getattr(logits_process, name, None)) is not None)


# They look at each row by itself, and keep nothing between two calls but what is the same for all rows.
_ROW_BY_ROW = _known(
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinPLogitsWarper",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
    "WatermarkLogitsProcessor",
)
# They hold something of each row of the batch: (processor, part) -> the part's own.
_Adapt = Callable[[Any, Part], Any]
_ADAPTED: dict[Any, _Adapt] = {
    RepetitionPenaltyLogitsProcessor: _repetition,
    PrefixConstrainedLogitsProcessor: _prefix,
    **dict.fromkeys(_known("EncoderRepetitionPenaltyLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor"), _encoder_ids),
    **dict.fromkeys(_known("SynthIDTextWatermarkLogitsProcessor"), _stateful),
}
