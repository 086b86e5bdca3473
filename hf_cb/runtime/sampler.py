"""Sampler: from logits to one token per row.

The draw (`draws`) is `torch.multinomial` with the request's own generator: a request with seed s gets the tokens that plain
`generate()` gives for this row alone after `torch.manual_seed(s)`, whoever else is in the batch. A request's own rules come
first, row by row; then what its SamplingParams say, for all rows together (`warpers`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hf_cb.kernels.extension import is_loaded
from hf_cb.request import Request, RowRules, SamplingParams, TokenLogprobs
from hf_cb.runtime.draws import Draws, draw_all, draws, refusal
from hf_cb.runtime.logprobs import token_logprobs
from hf_cb.runtime.streams import to_device
from hf_cb.runtime.warpers import SeenTokens, bias, forbid, penalise_presence, penalise_repetition, warp


@dataclass(slots=True)
class RowState:
    """What sampling keeps of a request between steps. It moves only when a token is sampled: preemption cannot disturb it.

    `num_sampled`: output tokens before the next one. `num_asked`: those for which its rules, or its source of chance, have
    been asked: one more, if a step failed after that. They can't be asked for the same token again.
    """

    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    num_prompt_tokens: int
    rules: RowRules | None = field(default=None, repr=False)
    logprobs: int | None = None  # how many of the most probable tokens to report
    num_sampled: int = 0
    num_asked: int = 0
    draws: Draws | None = field(default=None, repr=False)
    seen: SeenTokens | None = field(default=None, repr=False)  # in prompt and output
    produced: SeenTokens | None = field(default=None, repr=False)  # in the output alone

    @classmethod
    def of(cls, request: Request, device: torch.device) -> RowState:
        """The state of a request that has sampled nothing yet."""
        params = request.sampling
        return cls(
            params,
            tuple(sorted(request.eos_token_ids)),
            len(request.prompt),
            request.rules,
            request.logprobs,
            draws=draws(params.seed, device) if params.do_sample else None,
            seen=SeenTokens(request.prompt) if params.repetition_penalty != 1.0 else None,
            produced=SeenTokens() if params.frequency_penalty or params.presence_penalty else None,
        )

    def forbidden(self) -> list[int]:
        """The ids that cannot come now, whatever the model says."""
        params, ids = self.params, list(self.params.suppress_tokens)
        if self.num_sampled < params.min_new_tokens:
            ids.extend(self.eos_token_ids)
        if self.num_sampled == 0:
            ids.extend(params.begin_suppress_tokens)
        return ids

    @property
    def needs_host(self) -> bool:
        """Whether its next token can't be sampled before the value of this one has come to the host."""
        return any(own is not None for own in (self.rules, self.seen, self.produced, self.logprobs))

    def accept(self, token: int, scores: torch.Tensor) -> bool:
        """Take note of a sampled token and the scores [1, vocab] it was chosen by. True: the request's rules end it here."""
        for tokens in (self.seen, self.produced):
            if tokens is not None:
                tokens.add(token)
        if self.rules is None:
            return False
        return self.rules.accept(token, scores)


@dataclass(slots=True, eq=False)
class Chosen:
    """Tokens that are chosen, and may not have come to the host yet."""

    tokens: torch.Tensor  # [n] int64, on the device of the logits; -1 where a row has no probabilities to draw by
    has_nan: torch.Tensor  # [n] bool: whether there is a NaN in each row's scores, what is forbidden left out
    errors: dict[int, BaseException]  # index of the row -> what is known already
    logits: torch.Tensor  # [n, vocab]
    scores: torch.Tensor  # [n, vocab]: by what the tokens were chosen, as far as rules want to know; then float32
    final: dict[int, torch.Tensor]  # index of the row -> its scores [1, m] in its rules' own form, which it was chosen by


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token for each row, or that row's own error."""

    tokens: list[int]
    errors: dict[int, BaseException]  # index of the row -> error; its entry in `tokens` means nothing
    stopped: frozenset[int] = frozenset()  # indices of the rows that end here by their own rules
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # index of a row that asked for it -> its token's


def sample(logits: torch.Tensor, rows: Sequence[RowState]) -> Sampled:
    """Choose the next token of each row from logits [n, vocab] (any float dtype; not changed)."""
    chosen = choose(logits, rows)
    return accept(chosen, rows, chosen.tokens.tolist(), chosen.has_nan.tolist())


def choose(logits: torch.Tensor, rows: Sequence[RowState]) -> Chosen:
    """The part of `sample` that goes to the device. Unless a row `needs_host`, nothing in it waits for that."""
    errors: dict[int, BaseException] = {i: _twice() for i, row in enumerate(rows) if row.num_asked > row.num_sampled}
    final: dict[int, torch.Tensor] = {}
    scores = _process(logits, rows, final, errors)
    tokens, has_nan = _best(scores)
    drawing = [i for i, row in enumerate(rows) if row.params.do_sample and i not in errors and i not in final]
    if drawing:
        index = to_device(drawing, torch.int64, scores.device)
        warped = warp(scores.index_select(0, index).float(), [rows[i].params for i in drawing])
        drawn = draw_all([_source(rows[i]) for i in drawing], warped.softmax(dim=-1))
        for i in drawing:
            rows[i].num_asked = rows[i].num_sampled + 1
        tokens.index_copy_(0, index, drawn)
        for j, i in enumerate(drawing):
            if rows[i].rules is not None:
                scores[i] = warped[j]
    for i, own in final.items():
        try:
            tokens[i] = _source(rows[i]).draw(own.softmax(dim=-1)[0]) if rows[i].params.do_sample else own.argmax()
        except Exception as error:
            errors[i] = error
    for row in rows:
        row.num_sampled += 1
    return Chosen(tokens, has_nan, errors, logits, scores, final)


def _twice() -> RuntimeError:
    return RuntimeError("a step failed after a token had been drawn for it, and can't draw the same one again")


def accept(chosen: Chosen, rows: Sequence[RowState], tokens: list[int], has_nan: list[bool]) -> Sampled:
    """The rest of it, when the tokens and what `has_nan` says have come to the host."""
    errors, stopped = chosen.errors, set()
    for i, token in enumerate(tokens):
        if token < 0:  # no probability left, or NaN: this row's logits are at fault, nobody else's
            errors.setdefault(i, refusal())
        if has_nan[i] and rows[i].rules is None:  # greedy decoding would take the first NaN for the best token
            errors.setdefault(i, FloatingPointError("its logits hold NaN"))
    for i, row in enumerate(rows):
        try:
            if i not in errors and row.needs_host and row.accept(tokens[i], chosen.final.get(i, chosen.scores[i : i + 1])):
                stopped.add(i)
        except BaseException as error:
            errors[i] = error
    asking = {i: row.logprobs for i, row in enumerate(rows) if row.logprobs is not None and i not in errors}
    return Sampled(tokens, errors, frozenset(stopped), _logprobs(chosen.logits, asking, tokens, errors))


def _logprobs(
    logits: torch.Tensor, asking: dict[int, int], tokens: Sequence[int], errors: dict[int, BaseException]
) -> dict[int, TokenLogprobs]:
    """By index of the row. The tokens are chosen and can't be again: what fails here is tried in halves, not the step."""
    if not asking:
        return {}
    rows = list(asking)
    try:
        found = token_logprobs(logits[rows], [tokens[i] for i in rows], list(asking.values()))
    except Exception as error:
        if len(rows) == 1:
            errors[rows[0]] = error
            return {}
        halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        first, second = (_logprobs(logits, {i: asking[i] for i in half}, tokens, errors) for half in halves)
        return first | second
    notes = dict(zip(rows, found, strict=True))
    errors.update({i: FloatingPointError("its logits hold NaN") for i, note in notes.items() if math.isnan(note.logprob)})
    return notes


def _best(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first best token of each row of scores, [n] int64, and whether there is a NaN in that row, [n] bool."""
    if scores.device.type == "cpu" and is_loaded() and scores.dtype in (torch.float32, torch.bfloat16, torch.float16):
        tokens, has_nan = torch.ops.hf_cb.best(scores)
        return tokens, has_nan
    has_nan = scores.amax(dim=-1).isnan()  # the largest of a row with a NaN is NaN
    if scores.device.type == "cpu":  # where numpy is ten times as fast at it
        return torch.from_numpy(scores.float().numpy().argmax(axis=-1)), has_nan
    return scores.argmax(dim=-1), has_nan


def _source(row: RowState) -> Draws:
    assert row.draws is not None
    return row.draws


def _process(
    logits: torch.Tensor, rows: Sequence[RowState], final: dict[int, torch.Tensor], errors: dict[int, BaseException]
) -> torch.Tensor:
    """What does not depend on sampling, from logits to scores [n, vocab]: a copy in float32 where any row asks for anything, or
    where they are finer than that. Scores that a row's rules give in a form of their own go to `final`."""
    biased = [(i, row.params.logit_bias) for i, row in enumerate(rows) if row.params.logit_bias]
    penalties = [(i, row.params.repetition_penalty, row.seen) for i, row in enumerate(rows) if row.seen is not None]
    present = [(i, row.params, row.produced) for i, row in enumerate(rows) if row.produced is not None]
    forbidden = [(i, ids) for i, row in enumerate(rows) if (ids := row.forbidden())]
    ruled = [(i, row.rules) for i, row in enumerate(rows) if row.rules is not None and i not in errors]
    if not (biased or penalties or present or forbidden or ruled):
        return logits if logits.dtype.itemsize <= 4 else logits.float()
    scores = logits.to(torch.float32, copy=True)
    for i, rules in ruled:
        rows[i].num_asked = rows[i].num_sampled + 1
        try:
            own = rules.process(scores[i : i + 1])
            if own.shape[1:] == scores.shape[1:] and own.dtype == scores.dtype:
                scores[i] = own[0]
            else:
                final[i] = own
        except BaseException as error:  # of the caller's own code, which may as well exit
            errors[i] = error
    bias(scores, biased)
    penalise_repetition(scores, penalties)
    penalise_presence(scores, present)
    forbid(scores, forbidden)
    return scores
