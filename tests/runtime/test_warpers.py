"""The vectorised warpers against transformers' own, to the bit: every mixture, with ties, narrow borders and nothing left."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_cb.request import SamplingParams
from hf_cb.runtime.truncation import HEADS, filter_by_head
from hf_cb.runtime.warpers import SeenTokens, bias, forbid, penalise_presence, penalise_repetition, warp

OPTIONS = st.builds(
    SamplingParams,
    do_sample=st.just(True),
    temperature=st.sampled_from([1.0, 0.3, 0.7, 1.5, 4.0]),
    top_k=st.sampled_from([0, 0, 1, 5, 50, *(k + i for k in HEADS for i in (-1, 0)), 5000, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 0.0, 1e-3, 0.3, 0.5, 0.9, 0.95, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.5, 1.0]),
)


def by_transformers(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Scores [1, vocab] after plain generate's warpers."""
    warpers = LogitsProcessorList()
    if params.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(torch.ones(1, 1, dtype=torch.long), scores)


def logits_of(kind: str, rows: int, vocab: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(rows, vocab, generator=generator)
    if kind == "peaked":
        ranks = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(rows)])
        return -1.3 * (ranks + 1.0).log() + 0.5 * noise
    if kind == "ties":
        return (noise * 3).round()
    if kind == "coarse":  # as bfloat16 logits are: many equal
        return (noise * 4).bfloat16().float()
    if kind == "few":  # the rest was suppressed
        return noise.masked_fill(torch.rand(rows, vocab, generator=generator) < 0.98, -math.inf)
    return noise * 2


@settings(max_examples=60, deadline=None)
@given(
    params=st.lists(OPTIONS, min_size=1, max_size=8),
    kind=st.sampled_from(["peaked", "ties", "coarse", "few", "flat"]),
    vocab=st.sampled_from([5, 100, 777, 6000]),
    seed=st.integers(0, 10**6),
)
def test_to_the_bit(params: list[SamplingParams], kind: str, vocab: int, seed: int) -> None:
    logits = logits_of(kind, len(params), vocab, seed)
    want = torch.cat([by_transformers(row[None].clone(), p) for row, p in zip(logits, params, strict=True)])
    got = warp(logits.clone(), params)
    for i, p in enumerate(params):
        assert torch.equal(got[i], want[i]) or (want[i].isnan() == got[i].isnan()).all(), p


def test_most_rows_need_no_sort() -> None:
    """Else it would be right, but slow."""
    settings_ = SamplingParams(do_sample=True)
    params = [
        replace(settings_, **o)
        for o in ({"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.9, "min_p": 0.1}, {"top_k": 50, "top_p": 0.9})
    ] * 16
    logits = logits_of("peaked", len(params), 6000, 0)
    assert len(filter_by_head(logits, params)) < 4


def test_one_that_is_not_certain_is_left_as_it_is() -> None:
    logits = torch.zeros(1, 5000)
    for options in ({"top_k": 50}, {"top_p": 0.5}, {"min_p": 0.5}):
        assert filter_by_head(logits, [SamplingParams(do_sample=True, **options)]) == [0]
        assert not logits.any()


@pytest.mark.parametrize("vocab", [40, 4000])
def test_penalties_and_suppression(vocab: int) -> None:
    logits = logits_of("flat", 6, vocab, 3)
    ids = torch.randint(0, vocab + 3, (6, 30), generator=torch.Generator().manual_seed(1))  # some outside the vocabulary
    penalties = [1.2, 0.7, 3.0, 1.2, 1.0, 2.5]
    got = logits.clone()
    seen = [SeenTokens(row[:20].tolist()) for row in ids]
    for row, tokens in zip(seen, ids, strict=True):
        for token in tokens[20:].tolist():
            row.add(token)
    penalise_repetition(got, [(i, penalties[i], seen[i]) for i in range(6) if penalties[i] != 1.0])
    forbid(got, [(2, [1, 5, -1, vocab]), (4, [7])])
    want = [RepetitionPenaltyLogitsProcessor(p)(ids[i : i + 1], logits[i : i + 1].clone()) for i, p in enumerate(penalties)]
    want[2] = SuppressTokensLogitsProcessor([1, 5, -1, vocab])(ids[2:3], want[2])
    want[4] = SuppressTokensLogitsProcessor([7])(ids[4:5], want[4])
    assert torch.equal(got, torch.cat(want))


def test_a_tie_at_the_last_of_top_k() -> None:
    """transformers keeps all that tie with it, and its top-p counts them."""
    scores = torch.tensor([[3.0, 2.0, 2.0, 1.0, 0.0, 0.0, -1.0]])
    params = SamplingParams(do_sample=True, top_k=2, top_p=0.65)
    want = by_transformers(scores.clone(), params)
    assert want.isfinite().sum() == 2
    assert torch.equal(warp(scores.clone(), [params]), want)


def test_biases_and_penalties_of_the_output() -> None:
    """Against a sum for each token, at places inside the vocabulary alone; rows that ask for nothing stay as they are."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(4, 50, generator=generator)
    output = torch.randint(0, 50, (4, 60), generator=generator).tolist()
    params = [SamplingParams(frequency_penalty=f, presence_penalty=p) for f, p in ((0.7, 0.0), (0.0, 1.9), (-0.3, 0.4))]
    seen = [SeenTokens() for _ in params]
    for tokens, row in zip(output, seen, strict=False):
        for token in (*tokens, 1000):
            row.add(token)
    biases = [(1, ((3, 2.5), (7, -100.0), (50, 1.0))), (3, ((0, -1.5),))]
    want = scores.clone()
    for row, pairs in biases:
        for token, value in pairs:
            if token < 50:
                want[row, token] += value
    for i, p in enumerate(params):
        for token in set(output[i]):
            want[i, token] -= p.frequency_penalty * output[i].count(token) + p.presence_penalty
    bias(scores, biases)
    penalise_presence(scores, [(i, p, s) for i, (p, s) in enumerate(zip(params, seen, strict=True))])
    assert torch.equal(scores[3], want[3])
    torch.testing.assert_close(scores, want)
