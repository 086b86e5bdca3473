"""The compiled search for the best token of each row: numpy's answer, over logits as the model gives them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_cb.kernels.extension import load
from hf_cb.request import Request, SamplingParams
from hf_cb.runtime.sampler import RowState, choose

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True, scope="module")
def _built() -> None:
    load()


def check(logits: torch.Tensor) -> None:
    tokens, has_nan = torch.ops.hf_cb.best(logits)
    assert tokens.tolist() == logits.float().numpy().argmax(-1).tolist()
    assert has_nan.tolist() == np.isnan(logits.float().numpy()).any(-1).tolist()


@each_dtype
@pytest.mark.parametrize("vocab", [1, 2, 31, 32, 33, 1023, 1024, 1025, 5000])
def test_the_first_of_the_best(vocab: int, dtype: torch.dtype) -> None:
    """Of a few values, so that there are ties; the best in every place of a small row."""
    generator = torch.Generator().manual_seed(vocab)
    for rows in (1, 7, 300):
        check(torch.randint(-3, 3, (rows, vocab), generator=generator).to(dtype))
        check(torch.randn(rows, vocab, generator=generator).to(dtype))
    check(torch.eye(min(vocab, 1100), vocab).to(dtype))
    check(-torch.eye(min(vocab, 1100), vocab).to(dtype))


@each_dtype
def test_infinities_and_what_is_no_number(dtype: torch.dtype) -> None:
    for place in (0, 31, 32, 1000, 1024, 2047, 2049):
        for value in (math.nan, math.inf, -math.inf):
            logits = torch.zeros(3, 2050, dtype=dtype)
            logits[1, place] = value
            check(logits)
            logits[1, place // 2] = math.nan
            logits[2, 5:] = math.inf
            check(logits)
    check(torch.full((2, 2050), -math.inf, dtype=dtype))
    check(torch.full((2, 2050), math.nan, dtype=dtype))


@each_dtype
def test_rows_wherever_they_lie(dtype: torch.dtype) -> None:
    whole = torch.randn(9, 3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    for part in (whole[::2], whole[:, 1:], whole[:, ::3], whole.t(), whole[:0]):
        check(part)


def test_what_is_refused() -> None:
    for logits in (torch.zeros(4), torch.zeros(2, 0), torch.zeros(2, 3, dtype=torch.float64)):
        with pytest.raises(RuntimeError, match=r"^logits: takes"):
            torch.ops.hf_cb.best(logits)


@each_dtype
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(suppress_tokens=(4,)), SamplingParams(do_sample=True)])
def test_a_nan_of_the_models_is_told_whatever_is_asked_for(sampling: SamplingParams, dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 20, dtype=dtype)
    logits[1, 3] = math.nan
    rows = [RowState.of(Request((1,), 5, frozenset(), sampling), CPU) for _ in range(2)]
    assert choose(logits, rows).has_nan.tolist() == [False, True]


@each_dtype
def test_a_nan_that_is_suppressed_harms_nobody(dtype: torch.dtype) -> None:
    """Plain generate chooses by the scores that are left. A row that holds nothing but NaN is as bad as ever."""
    logits = torch.zeros(3, 20, dtype=dtype)
    logits[:2, 7], logits[1, 3], logits[2] = 1.0, math.nan, math.nan
    rows = [RowState.of(Request((1,), 5, frozenset(), SamplingParams(suppress_tokens=(3,))), CPU) for _ in range(3)]
    chosen = choose(logits, rows)
    assert chosen.has_nan.tolist() == [False, False, True]
    assert chosen.tokens.tolist()[:2] == [7, 7]
