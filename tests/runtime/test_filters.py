"""A filter that is in the table is applied on every path: by the head of the distribution, whole, and on other devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_cb.request import SamplingParams
from hf_cb.runtime import warpers
from hf_cb.runtime.warpers import FILTERS, Filter, warp
from hf_cb.sampling_options import SAMPLING

VALUES = {"top_k": 7, "top_p": 0.6, "min_p": 0.05}
WARPERS = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
PATHS = ("head", "whole", "another device")


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """`warp` takes the one that is named."""
    if request.param == "whole":
        monkeypatch.setattr(warpers, "filter_by_head", lambda scores, params: list(range(len(params))))
    elif request.param == "another device":
        monkeypatch.setattr(warpers, "_settled_by_head", None)  # it is not asked there
        monkeypatch.setattr(warpers, "_top_p_by_value", None)
    return request.param


class Elsewhere(torch.Tensor):
    """A tensor of the CPU's that says it is on another device."""

    @property
    def device(self) -> torch.device:
        return torch.device("meta")


def scores(rows: int = 6, vocab: int = 400) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)) * 3


def warped(own: torch.Tensor, params: Sequence[SamplingParams], path: str, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    if path != "another device":
        return warp(own.clone(), params)
    monkeypatch.setattr(warpers, "to_device", lambda values, dtype, device: torch.as_tensor(values, dtype=dtype))
    return torch.Tensor(warp(own.clone().as_subclass(Elsewhere), params))


def test_the_table_has_every_option_of_its_kind() -> None:
    assert [one.option for one in FILTERS] == [o.name for o in SAMPLING if o.draws and o.name != "temperature"]
    assert {o.name: o.off for o in SAMPLING} | {"seed": 0} == {f.name: f.default for f in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("option", VALUES)
def test_each_is_transformers_own(option: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = scores()
    params = [SamplingParams(do_sample=True, **({option: VALUES[option]} if i % 2 else {})) for i in range(len(own))]
    want = own.clone()
    want[1::2] = WARPERS[option](VALUES[option])(None, own[1::2].clone())
    assert torch.equal(warped(own, params, path, monkeypatch), want)


@pytest.mark.parametrize("place", [0, 1, len(FILTERS)])
def test_a_filter_that_is_added(place: int, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whatever place of the table, for rows with and without the others."""

    def drop_even(part: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
        part[:, ::2] = -math.inf
        return part

    added = Filter("min_new_tokens", lambda p: p.min_new_tokens == 1, drop_even)
    monkeypatch.setattr(warpers, "FILTERS", (*FILTERS[:place], added, *FILTERS[place:]))
    own = scores()
    params = [
        SamplingParams(do_sample=True, min_new_tokens=i % 2, top_k=VALUES["top_k"] * (i % 3 == 1), top_p=0.6 if i > 3 else 1.0)
        for i in range(len(own))
    ]
    want = own.clone()
    for row, p in zip(want, params, strict=True):
        for one in warpers.FILTERS:
            if one is added and one.is_on(p):
                row[::2] = -math.inf
            elif one.is_on(p):
                row[:] = WARPERS[one.option](VALUES[one.option])(None, row[None].clone())[0]
    assert torch.equal(warped(own, params, path, monkeypatch), want)
