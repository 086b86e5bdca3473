"""The sampler against transformers' own processors: rows with all kinds of options in one batch, each as if it were alone."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_cb.request import Request, SamplingParams
from hf_cb.runtime.logprobs import PromptLogprobs
from hf_cb.runtime.sampler import RowState, sample

VOCAB = 40
CPU = torch.device("cpu")
EOS = frozenset({3, 17})
PARAMS = [
    SamplingParams(),
    SamplingParams(min_new_tokens=3),
    SamplingParams(do_sample=True, seed=1),
    SamplingParams(do_sample=True, temperature=0.3, seed=2),
    SamplingParams(do_sample=True, temperature=2.0, top_k=5, seed=3),
    SamplingParams(do_sample=True, temperature=2.0, top_p=0.5, seed=4),
    SamplingParams(do_sample=True, temperature=0.3, top_k=5, top_p=0.9, min_new_tokens=2, seed=5),
    SamplingParams(do_sample=True, top_k=1000, top_p=1.0, seed=6),
    SamplingParams(do_sample=True, top_k=1, seed=7),
    SamplingParams(do_sample=True, top_p=0.0, seed=8),
    SamplingParams(temperature=0.1, top_k=3),  # without sampling they mean nothing
]


def state(params: SamplingParams, eos: frozenset[int] = EOS) -> RowState:
    return RowState.of(Request((1,), 100, eos, params), CPU)


def by_transformers(logits: torch.Tensor, params: SamplingParams) -> list[int]:
    """The tokens of one row over steps, logits [steps, vocab], as plain generate chooses them."""
    processors = LogitsProcessorList()
    if params.min_new_tokens:
        processors.append(MinNewTokensLengthLogitsProcessor(1, params.min_new_tokens, sorted(EOS)))
    if params.do_sample:
        if params.temperature != 1.0:
            processors.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            processors.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1.0:
            processors.append(TopPLogitsWarper(params.top_p))
    tokens, ids = [], torch.ones(1, 1, dtype=torch.long)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(params.seed)
        for step in logits:
            scores = processors(ids, step[None].float())
            token = torch.multinomial(scores.softmax(-1), 1) if params.do_sample else scores.argmax(-1, keepdim=True)
            tokens.append(int(token))
            ids = torch.cat([ids, token], dim=1)
    return tokens


def logits_of(steps: int, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    logits = torch.randn(steps, rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, :, 3] += 4  # the end is likely, so that holding it back shows
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_all_kinds_together(dtype: torch.dtype) -> None:
    logits, rows = logits_of(12, len(PARAMS), dtype), [state(params) for params in PARAMS]
    before = logits.clone()
    sampled = [sample(step, rows) for step in logits]
    assert not any(s.errors for s in sampled)
    for i, params in enumerate(PARAMS):
        assert [s.tokens[i] for s in sampled] == by_transformers(logits[:, i], params), params
    assert torch.equal(logits, before)


def test_rows_that_come_and_go() -> None:
    """Which rows share a step changes nothing for any of them."""
    logits, rows = logits_of(8, len(PARAMS)), [state(params) for params in PARAMS]
    got: list[list[int]] = [[] for _ in PARAMS]
    for turn in range(3 * 8):
        members = [i for i in range(len(PARAMS)) if (i + turn) % 3 == 0 and len(got[i]) < 8]
        if members:
            step = torch.stack([logits[len(got[i]), i] for i in members])
            for i, token in zip(members, sample(step, [rows[i] for i in members]).tokens, strict=True):
                got[i].append(token)
    assert got == [by_transformers(logits[:, i], params) for i, params in enumerate(PARAMS)]


def test_the_end_is_held_back_for_so_many_tokens() -> None:
    rows = [state(SamplingParams(min_new_tokens=n)) for n in (0, 1, 3)]
    logits = torch.zeros(3, VOCAB)
    logits[:, 3], logits[:, 17], logits[:, 5] = 3.0, 2.0, 1.0
    assert [sample(logits, rows).tokens for _ in range(4)] == [[3, 5, 5], [3, 3, 5], [3, 3, 5], [3, 3, 3]]


def test_an_end_outside_the_vocabulary_holds_nothing_back() -> None:
    rows = [state(SamplingParams(min_new_tokens=2), frozenset({-1, VOCAB, 1 << 70})), state(SamplingParams(min_new_tokens=2))]
    logits = torch.zeros(2, VOCAB)
    logits[:, -1], logits[:, 3] = 1.0, 2.0
    assert sample(logits, rows).tokens == [3, VOCAB - 1]


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_a_row_without_probabilities_fails_alone(bad: float) -> None:
    rows = [state(PARAMS[4]), state(PARAMS[4]), state(PARAMS[0])]
    logits = logits_of(1, 3)[0]
    logits[1] = bad
    sampled = sample(logits, rows)
    assert list(sampled.errors) == [1]
    assert sampled.tokens[0] == by_transformers(logits[None, 0], PARAMS[4])[0]
    assert sampled.tokens[2] == by_transformers(logits[None, 2], PARAMS[0])[0]


def test_a_request_that_does_not_sample_draws_nothing() -> None:
    assert state(SamplingParams(seed=4)).draws is None
    assert state(SamplingParams(do_sample=True, seed=4)).draws is not None


def test_prompt_positions_that_were_never_computed() -> None:
    """Whoever skips a part of the prompt makes an error of it, not a wrong answer."""
    prompt = PromptLogprobs((1, 2, 3, 4, 5), 1)
    assert prompt.wanted(2, 9) == range(2, 4)
    prompt.note(2, torch.zeros(2, VOCAB))
    assert not prompt.is_whole
    prompt.note(0, torch.zeros(3, VOCAB))
    prompt.note(3, torch.zeros(1, VOCAB))
    assert prompt.wanted(0, 9) == range(4, 4)
    assert prompt.is_whole
