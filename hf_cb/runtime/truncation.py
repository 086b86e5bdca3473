"""Top-k, top-p and min-p from the head of the distribution: its most probable tokens, which are found without sorting the rest.

Only what is certain is taken from here. A row whose answer hangs on the rounding of a sum, on a tie, or on tokens beyond the
head is left to the exact form, so that every row has transformers' result to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hf_cb.request import SamplingParams

HEADS = (64, 256, 2048)  # tokens: longer ones cost more, the longest still an eighth of a sort
_RATIO = 3e-5  # far above the relative rounding of a float32 sum over a vocabulary
_MASS = 2e-6  # the same of a sum that is near one


def filter_by_head(scores: torch.Tensor, params: Sequence[SamplingParams]) -> list[int]:
    """Filter in place the rows of scores [n, vocab] that are certain; the rows that still need the exact form."""
    waiting: list[list[int]] = [[] for _ in HEADS]
    left = []
    for i, p in enumerate(params):
        has_k = 0 < p.top_k < scores.shape[-1]
        if has_k and p.top_k >= HEADS[-1]:
            left.append(i)
        elif has_k:
            waiting[next(level for level, length in enumerate(HEADS) if p.top_k < length)].append(i)
        elif p.top_p < 1.0:
            waiting[1].append(i)
        elif p.min_p > 0.0:
            left.append(i)  # by itself it needs no order
    for level, length in enumerate(HEADS):
        members = waiting[level]
        if not members:
            continue
        index = torch.tensor(members, device=scores.device, dtype=torch.int64)
        head, certain, longer = _filter(scores[index], min(length, scores.shape[-1]), [params[i] for i in members])
        sure_index = index[certain]
        scores.index_fill_(0, sure_index, -math.inf)
        scores.index_put_((sure_index[:, None], head.indices[certain]), head.values[certain])
        for i, sure, more in zip(members, certain.tolist(), longer.tolist(), strict=True):
            if not sure:
                (waiting[level + 1] if more and level + 1 < len(HEADS) else left).append(i)
    return sorted(left)


class _Head(NamedTuple):
    """The most probable tokens of each row."""

    values: torch.Tensor  # [n, length], -inf for tokens that are not
    indices: torch.Tensor  # [n, length]


def _filter(scores: torch.Tensor, length: int, params: Sequence[SamplingParams]) -> tuple[_Head, torch.Tensor, torch.Tensor]:
    """(filtered heads, whether each row [n] is certain, whether a longer head may help)."""
    vocab_size = scores.shape[-1]
    values, ids = torch.topk(scores, length)
    rank = torch.arange(length, dtype=torch.int64, device=scores.device)

    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=scores.device)[:, None]

    top_k = column([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], torch.int64)
    top_p = column([p.top_p if p.top_p < 1.0 else math.inf for p in params], torch.float64)
    min_p = column([p.min_p for p in params], torch.float64)
    within = rank < top_k
    to_best = (values.double() - values[:, :1].double()).exp()  # probability over the best token's
    total = (to_best * within).sum(dim=-1, keepdim=True)
    if bool((top_k == vocab_size).any()):
        whole = (scores - values[:, :1]).exp_().sum(dim=-1, dtype=torch.float64)[:, None]
        total = torch.where(top_k < vocab_size, total, whole)
    probs = to_best / total
    above = probs.cumsum(dim=-1) - probs  # the mass of the tokens before each
    keep = within & ((above < top_p) & (to_best >= min_p) | (rank == 0))

    near_p = (above - top_p).abs() < _MASS + _RATIO * (1 - top_p).abs()
    near_min = (to_best - min_p).abs() < _RATIO * min_p
    close = (rank > 0) & within & (near_p & top_p.isfinite() | near_min)
    tied = keep[:, :-1] & ~keep[:, 1:] & (values[:, :-1] == values[:, 1:])  # across the border
    beyond = keep[:, -1] & (length < vocab_size)
    # transformers' top-k keeps all that tie with the last one, and its top-p then counts them.
    tied_at_k = (rank[:-1] == top_k - 1) & (values[:, :-1] == values[:, 1:])
    certain = values[:, 0].isfinite() & ~(close.any(dim=-1) | tied.any(dim=-1) | tied_at_k.any(dim=-1) | beyond)
    return _Head(values.masked_fill(~keep, -math.inf), ids), certain, beyond
