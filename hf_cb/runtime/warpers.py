"""Warpers: the common logits processors of transformers for many rows at once, each row with its own setting.

The arithmetic of every row is transformers' to the bit, in float32: the same operations on the row's own numbers, whoever
stands beside it. Scores are changed in place; a row whose option is off is left as it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hf_cb.request import SamplingParams
from hf_cb.runtime.streams import to_device
from hf_cb.runtime.truncation import filter_by_head


class SeenTokens:
    """The distinct token ids of one row so far, in the order of their first coming, and how often each has come."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        counted = Counter(tokens)
        self._places = {token: place for place, token in enumerate(counted)}
        self._table = np.array([list(counted), list(counted.values())], np.int64)  # [2, room]: ids, counts

    @property
    def ids(self) -> np.ndarray:
        """The distinct ids, [n] int64."""
        return self._table[0, : len(self._places)]

    @property
    def counts(self) -> np.ndarray:
        """[n] int64, each at least 1."""
        return self._table[1, : len(self._places)]

    def add(self, token: int) -> None:
        """Note a token of the output."""
        place = self._places.setdefault(token, len(self._places))
        room = self._table.shape[1]
        if place == room:
            self._table = np.concatenate([self._table, np.zeros((2, max(16, room)), np.int64)], axis=1)
        self._table[0, place] = token
        self._table[1, place] += 1


def bias(scores: torch.Tensor, rows: Sequence[tuple[int, Sequence[tuple[int, float]]]]) -> None:
    """Add to the scores of single tokens. `rows`: (row of scores, (token id, what to add) of distinct ids)."""
    _add(scores, [(row, np.array([token for token, _ in pairs]), np.array([add for _, add in pairs])) for row, pairs in rows])


def penalise_presence(scores: torch.Tensor, rows: Sequence[tuple[int, SamplingParams, SeenTokens]]) -> None:
    """Take from the scores of seen tokens `frequency_penalty` for each time, and `presence_penalty`, of each row's params."""
    _add(scores, [(i, seen.ids, -(seen.counts * p.frequency_penalty + p.presence_penalty)) for i, p, seen in rows])


def _add(scores: torch.Tensor, rows: Sequence[tuple[int, np.ndarray, np.ndarray]]) -> None:
    """`rows`: (row of scores, distinct ids [n], what to add [n]); a sum is rounded to float32 once."""
    inside = [(row, ids, values, (ids >= 0) & (ids < scores.shape[-1])) for row, ids, values in rows]
    at = _positions([(row, ids) for row, ids, _, _ in inside], scores.shape[-1], scores.device)
    if at is not None:
        values = np.concatenate([values[known] for _, _, values, known in inside]).astype(np.float32)
        scores[at] += to_device(values, torch.float32, scores.device)


def penalise_repetition(scores: torch.Tensor, rows: Sequence[tuple[int, float, SeenTokens]]) -> None:
    """Divide the positive and multiply the negative scores of seen tokens. `rows`: (row of scores, penalty, its tokens)."""
    vocab_size = scores.shape[-1]
    by_penalty: dict[float, list[tuple[int, SeenTokens]]] = {}
    for row, penalty, seen in rows:
        by_penalty.setdefault(penalty, []).append((row, seen))
    for penalty, members in by_penalty.items():  # a scalar each: on a GPU that is another division than by a tensor
        at = _positions([(row, seen.ids) for row, seen in members], vocab_size, scores.device)
        if at is not None:
            score = scores[at]
            scores[at] = torch.where(score < 0, score * penalty, score / penalty)


def forbid(scores: torch.Tensor, tokens: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Take all probability from these tokens: (row of scores, ids); ids outside the vocabulary are never sampled anyway."""
    at = _positions([(row, np.array(ids)) for row, ids in tokens], scores.shape[-1], scores.device)
    if at is not None:
        scores[at] = -math.inf


def _positions(
    tokens: Sequence[tuple[int, np.ndarray]], vocab_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Row and column indices of token ids, those outside the vocabulary left out; None if there are none."""
    inside = [(row, ids[(ids >= 0) & (ids < vocab_size)].astype(np.int64)) for row, ids in tokens]
    if not any(len(ids) for _, ids in inside):
        return None
    rows = np.repeat([row for row, _ in inside], [len(ids) for _, ids in inside])
    columns = np.concatenate([ids for _, ids in inside])
    return to_device(rows, torch.int64, device), to_device(columns, torch.int64, device)


def warp(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The temperature, then the `FILTERS`, of each row of scores [n, vocab]."""
    hot = [p.temperature for p in params]
    if any(value != 1.0 for value in hot):
        _temperature(scores, hot)
    # On a GPU sorting is cheap, and looking whether a row is certain would wait for the device.
    settled = _settled_by_head(scores, params) if scores.device.type == "cpu" else set()
    for one in FILTERS:
        members = [i for i, p in enumerate(params) if one.is_on(p) and not (one.by_head and i in settled)]
        if not members:
            continue
        values = [float(getattr(params[i], one.option)) for i in members]
        index = to_device(members, torch.int64, scores.device)
        scores.index_copy_(0, index, one.apply(scores.index_select(0, index), values))
    return scores


def _settled_by_head(scores: torch.Tensor, params: Sequence[SamplingParams]) -> set[int]:
    """Apply the filters that the head of the distribution tells, to the rows for which it does; which those are.

    A row with another filter before one of those is left to the exact forms, in their order.
    """
    last = max(i for i, one in enumerate(FILTERS) if one.by_head)
    others = [one for one in FILTERS[:last] if not one.by_head]
    able = [i for i, p in enumerate(params) if not any(one.is_on(p) for one in others)]
    index = to_device(able, torch.int64, scores.device)
    own = scores if len(able) == len(params) else scores.index_select(0, index)
    left = {able[i] for i in filter_by_head(own, [params[i] for i in able])} if able else set()
    if own is not scores:
        scores.index_copy_(0, index, own)
    return set(able) - left


def _column(values: Sequence[float], scores: torch.Tensor) -> torch.Tensor:
    """One value per row, [n, 1], rounded to float32 as a scalar is."""
    return to_device(values, scores.dtype, scores.device)[:, None]


def _temperature(scores: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    divisors = _column(values, scores)
    if scores.is_cuda:  # there, dividing by a scalar is multiplying by its reciprocal
        return scores.mul_(divisors.reciprocal())
    return scores.div_(divisors)


def _top_k(scores: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    ks = [min(int(k), scores.size(-1)) for k in values]
    best = torch.topk(scores, max(ks))[0]
    least = best.gather(1, to_device(ks, torch.int64, scores.device)[:, None] - 1)
    return scores.masked_fill_(scores < least, -math.inf)


def _top_p(scores: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    if scores.device.type == "cpu":
        tied = _top_p_by_value(scores, values)
        if tied:
            scores[tied] = _top_p_by_order(scores[tied], [values[i] for i in tied])
        return scores
    return _top_p_by_order(scores, values)


def _top_p_by_value(scores: torch.Tensor, values: Sequence[float]) -> list[int]:
    """The same from sorted values alone, which numpy sorts faster than torch sorts with their order. Returns the rows that it
    leaves: where tokens of one value are on both sides of the border, their order counts."""
    ascending = torch.from_numpy(np.sort(scores.numpy(), axis=-1))
    drop = ascending.softmax(dim=-1).cumsum(dim=-1) <= _column([1 - p for p in values], scores)
    first = drop[:, :-1].sum(dim=-1, keepdim=True)  # probabilities are not negative, so what is dropped comes first
    least = ascending.gather(1, first)
    tied = (ascending.gather(1, (first - 1).clamp_(min=0)) == least) & (first > 0) | ascending[:, -1:].isnan()
    scores.masked_fill_((scores < least) & ~tied, -math.inf)
    return tied.flatten().nonzero().flatten().tolist()


def _top_p_by_order(scores: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    ascending, order = torch.sort(scores, descending=False)
    drop = ascending.softmax(dim=-1).cumsum(dim=-1) <= _column([1 - p for p in values], scores)
    drop[..., -1:] = False  # the most probable token always stays
    return scores.masked_fill_(drop.scatter(1, order, drop), -math.inf)


def _min_p(scores: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    probs = scores.softmax(dim=-1)
    best, order = probs.max(dim=-1, keepdim=True)
    drop = (probs < _column(values, scores) * best).scatter_(1, order, False)
    return scores.masked_fill_(drop, -math.inf)


class Filter(NamedTuple):
    """What takes tokens away from those that are drawn from. `apply`: (scores [n, vocab], a value for each row) -> scores.

    `by_head`: whether `truncation` knows it, too.
    """

    option: str
    is_on: Callable[[SamplingParams], bool]
    apply: Callable[[torch.Tensor, Sequence[float]], torch.Tensor]
    by_head: bool = False


FILTERS: tuple[Filter, ...] = (  # in their order, which is transformers' own
    Filter("top_k", lambda p: p.top_k != 0, _top_k, by_head=True),
    Filter("top_p", lambda p: p.top_p < 1.0, _top_p, by_head=True),
    Filter("min_p", lambda p: p.min_p > 0.0, _min_p, by_head=True),
)
