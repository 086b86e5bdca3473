"""Sampler: from logits to one token per row.

The arithmetic is that of transformers' warpers, in their order and in float32, done for all rows with the same option at once.
The draw is `torch.multinomial` with the request's own generator: a request with seed s gets the tokens that plain `generate()`
gives for this row alone after `torch.manual_seed(s)`, whoever else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hf_cb.request import Request, SamplingParams


@dataclass(slots=True)
class RowState:
    """What sampling keeps of a request between steps. It moves only when a token is sampled: preemption cannot disturb it."""

    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    num_sampled: int = 0
    generator: torch.Generator | None = field(default=None, repr=False)

    @classmethod
    def of(cls, request: Request, device: torch.device) -> RowState:
        """The state of a request that has sampled nothing yet."""
        params = request.sampling
        generator = torch.Generator(device).manual_seed(params.seed) if params.do_sample else None
        return cls(params, tuple(sorted(request.eos_token_ids)), 0, generator)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token for each row, or that row's own error."""

    tokens: list[int]
    errors: dict[int, Exception]  # index of the row -> error; its entry in `tokens` means nothing


def sample(logits: torch.Tensor, rows: Sequence[RowState]) -> Sampled:
    """Choose the next token of each row from logits [n, vocab] (any float dtype; not changed)."""
    scores = logits.float()
    scores = _hold_back_eos(scores, rows)
    tokens: list[int] = scores.argmax(dim=-1).tolist()
    errors: dict[int, Exception] = {}
    drawing = [i for i, row in enumerate(rows) if row.params.do_sample]
    if drawing:
        probs = _warp(scores[drawing], [rows[i].params for i in drawing]).softmax(dim=-1)
        for j, i in enumerate(drawing):
            try:
                tokens[i] = int(torch.multinomial(probs[j], 1, generator=rows[i].generator))
            except RuntimeError as error:  # no probability left, or NaN: this row's logits are at fault, nobody else's
                errors[i] = error
    for row in rows:
        row.num_sampled += 1
    return Sampled(tokens, errors)


def _hold_back_eos(scores: torch.Tensor, rows: Sequence[RowState]) -> torch.Tensor:
    vocab_size = scores.shape[-1]  # ids outside it are never sampled anyway
    held = [
        (i, token)
        for i, row in enumerate(rows)
        if row.num_sampled < row.params.min_new_tokens
        for token in row.eos_token_ids
        if 0 <= token < vocab_size
    ]
    if not held:
        return scores
    scores = scores.clone()
    index = torch.tensor(held, device=scores.device)
    scores[index[:, 0], index[:, 1]] = -math.inf
    return scores


def _warp(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Temperature, top-k, top-p: each on the rows that ask for it, rows with the same value together."""
    for of, is_off, apply in _WARPERS:
        groups: dict[float, list[int]] = {}
        for i, p in enumerate(params):
            if not is_off(of(p)):
                groups.setdefault(of(p), []).append(i)
        for value, members in groups.items():
            if len(members) == len(params):
                scores = apply(scores, value)
            else:
                scores = scores.index_copy(0, torch.tensor(members, device=scores.device), apply(scores[members], value))
    return scores


def _temperature(scores: torch.Tensor, temperature: float) -> torch.Tensor:
    return scores / temperature


def _top_k(scores: torch.Tensor, k: float) -> torch.Tensor:
    kth = torch.topk(scores, min(int(k), scores.size(-1)))[0][..., -1, None]
    return scores.masked_fill(scores < kth, -math.inf)


def _top_p(scores: torch.Tensor, p: float) -> torch.Tensor:
    ascending, order = torch.sort(scores, descending=False)
    drop = ascending.softmax(dim=-1).cumsum(dim=-1) <= (1 - p)
    drop[..., -1:] = False  # the most probable token always stays
    return scores.masked_fill(drop.scatter(1, order, drop), -math.inf)


_Option = Callable[[SamplingParams], float]
_WARPERS: tuple[tuple[_Option, Callable[[float], bool], Callable[[torch.Tensor, float], torch.Tensor]], ...] = (
    (lambda p: p.temperature, lambda value: value == 1.0, _temperature),
    (lambda p: p.top_k, lambda value: value == 0, _top_k),
    (lambda p: p.top_p, lambda value: value >= 1.0, _top_p),
)
