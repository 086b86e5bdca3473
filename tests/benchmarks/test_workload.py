from __future__ import annotations

import numpy as np
import pytest

from benchmarks.workload import Workload

SOURCE = range(5000)


def test_the_same_seed_gives_the_same_workload():
    assert Workload.make(SOURCE, 20, seed=3) == Workload.make(SOURCE, 20, seed=3)
    assert Workload.make(SOURCE, 20, seed=3) != Workload.make(SOURCE, 20, seed=4)


def test_lengths_have_the_stated_bounds_and_means():
    items = Workload.make(SOURCE, 4000, seed=0).items
    for lengths, least, most, mean in (
        ([len(item.prompt) for item in items], 8, 768, 128),
        ([item.output_length for item in items], 8, 384, 96),
    ):
        assert min(lengths) == least
        assert max(lengths) == most
        assert np.mean(lengths) == pytest.approx(mean, rel=0.1)
        assert np.median(lengths) < 0.75 * np.mean(lengths)  # a long tail


def test_prompts_are_cut_from_the_source():
    items = Workload.make(SOURCE, 50).items
    for item in items:
        assert item.prompt == tuple(range(item.prompt[0], item.prompt[0] + len(item.prompt)))
    assert len({item.prompt[0] for item in items}) > 45  # at different places: little to share


def test_a_source_shorter_than_a_prompt_is_refused():
    with pytest.raises(ValueError, match="source: takes more than"):
        Workload.make(range(10), 50)


def test_scale_shrinks_lengths_and_keeps_one_token():
    whole, small = (Workload.make(SOURCE, 200, scale=scale) for scale in (1.0, 0.1))
    assert small.prompt_tokens == pytest.approx(whole.prompt_tokens / 10, rel=0.02)
    assert min(item.output_length for item in Workload.make(SOURCE, 200, scale=0.001).items) == 1


def test_poisson_arrivals_have_the_rate_and_leave_the_lengths():
    at_once, spread = (Workload.make(SOURCE, 2000, rate=rate) for rate in (None, 4.0))
    assert {item.arrival for item in at_once.items} == {0.0}
    arrivals = [item.arrival for item in spread.items]
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.1)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # exponential gaps
    assert [(i.prompt, i.output_length) for i in at_once.items] == [(i.prompt, i.output_length) for i in spread.items]


def test_a_subset_is_spread_over_the_output_lengths_and_sent_at_once():
    whole = Workload.make(SOURCE, 48, rate=1.0)
    part = whole.subset(8)
    originals = {item.index: item for item in whole.items}
    assert len({item.index for item in part.items}) == 8
    for item in part.items:
        assert (item.prompt, item.output_length) == (originals[item.index].prompt, originals[item.index].output_length)
        assert item.arrival == 0
    assert part.output_tokens / 8 == pytest.approx(whole.output_tokens / 48, rel=0.15)
    assert whole.subset(48) is whole


def test_a_warmup_is_short():
    items = Workload.make(SOURCE, 48).warmup().items
    assert len(items) == 4
    assert max(item.output_length for item in items) <= 8
