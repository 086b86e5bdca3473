"""Sampled calls: a seed gives what plain generate gives for the row alone after `torch.manual_seed`, in any company."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import crowd
import models
import pytest
import seam
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

NEW = 16
PROMPT = seam.PROMPT
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.2},
    "top_k": {"top_k": 3, "temperature": 3.0},
    "top_k off": {"top_k": 0, "temperature": 3.0},
    "top_k above the vocabulary": {"top_k": 10_000, "temperature": 3.0},
    "top_p": {"top_p": 0.4, "top_k": 0, "temperature": 3.0},
    "top_p 1": {"top_p": 1.0, "temperature": 3.0},
    "all": {"temperature": 3.0, "top_k": 9, "top_p": 0.8},
    "all with an end held back": {"temperature": 3.0, "top_k": 9, "top_p": 0.8, "min_new_tokens": 5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_row(duo: seam.Duo, options: dict[str, Any]) -> None:
    ends = list(range(3, models.VOCAB, 11))
    for seed in range(6):
        duo.same(PROMPT, seed=seed, do_sample=True, max_new_tokens=NEW, eos_token_id=ends, pad_token_id=0, **options)


def test_seeds_matter(duo: seam.Duo) -> None:
    call = {"do_sample": True, "max_new_tokens": NEW, "temperature": 3.0}
    assert len({tuple(duo.served.generate(PROMPT, seed=seed, **call)[0].tolist()) for seed in range(8)}) == 8


def test_without_sampling_a_seed_changes_nothing(duo: seam.Duo) -> None:
    assert torch.equal(duo.same(PROMPT, seed=1, max_new_tokens=NEW), duo.same(PROMPT, max_new_tokens=NEW))


def alone(duo: seam.Duo, row: torch.Tensor, seed: int) -> list[int]:
    with seam.seeded(seed):
        out = duo.plain.generate(row[None], do_sample=True, temperature=2.0, max_new_tokens=NEW)
    return out[0, len(row) :].tolist()


def test_num_return_sequences(duo: seam.Duo) -> None:
    rows = seam.prompts(5, 11)
    call = {"do_sample": True, "temperature": 2.0, "max_new_tokens": NEW, "num_return_sequences": 3, "seed": 40}
    got = duo.served.generate(**seam.left_padded(rows), **call)
    assert got.shape == (6, 11 + NEW)
    assert [row[11:].tolist() for row in got] == [alone(duo, rows[i // 3], 40 + i) for i in range(6)]


def test_row_i_of_a_batch_has_the_seed_plus_i(duo: seam.Duo) -> None:
    rows = seam.prompts(5, 11, 2)
    call = {"do_sample": True, "temperature": 2.0, "max_new_tokens": NEW}
    want = [alone(duo, row, 40 + i) for i, row in enumerate(rows)]
    got = duo.served.generate(**seam.left_padded(rows), seed=40, **call)
    assert [row[11:].tolist() for row in got] == want
    assert [list(result.tokens) for result in duo.engine.generate_batch(rows, seed=40, **call)] == want
    assert list(duo.engine.submit(rows[1], seed=41, **call).result().tokens) == want[1]


@pytest.mark.parametrize(
    "options",
    [{}, {"max_batch_tokens": 5}, {"block_size": 4, "num_blocks": 12}, {"max_batch_size": 2}],
    ids=["together", "small budget", "small pool", "two at a time"],
)
def test_seeds_are_independent_of_neighbours_budget_and_preemption(duo: seam.Duo, options: dict[str, Any]) -> None:
    rows = seam.prompts(5, 11, 2, 8, 14, 3, 9, 1)
    with seam.duo(options=options) as other:
        call = {"do_sample": True, "temperature": 2.0, "max_new_tokens": NEW}
        calls = [lambda i=i, row=row: other.served.generate(row[None], seed=i, **call) for i, row in enumerate(rows)]
        got = crowd.answers(other.engine, calls)
        assert [out[0, -NEW:].tolist() for out in got] == [alone(duo, row, i) for i, row in enumerate(rows)]
        assert (other.engine.stats().preemptions > 0) == ("num_blocks" in options)


def test_without_a_seed_manual_seed_makes_it_repeatable(duo: seam.Duo) -> None:
    outputs = []
    with torch.random.fork_rng(devices=[]):
        for seed in (5, 5, 6):
            torch.manual_seed(seed)
            outputs.append([duo.served.generate(PROMPT, do_sample=True, temperature=3.0, max_new_tokens=NEW) for _ in range(3)])
    assert all(map(torch.equal, outputs[0], outputs[1]))
    assert not any(map(torch.equal, outputs[0], outputs[2]))
    assert not torch.equal(outputs[0][0], outputs[0][1])


def test_without_a_seed_a_call_draws_once_whatever_its_length(duo: seam.Duo) -> None:
    def state_after(**call: Any) -> torch.Tensor:
        torch.manual_seed(5)
        duo.served.generate(**call)
        return torch.get_rng_state()

    with torch.random.fork_rng(devices=[]):
        prompt = {"input_ids": PROMPT}
        torch.manual_seed(5)
        untouched = torch.get_rng_state()
        torch.randint(0, 1 << 62, ())
        one_draw = torch.get_rng_state()
        for call in (
            {**prompt, "max_new_tokens": 1},
            {**prompt, "max_new_tokens": 30},
            {**seam.left_padded(seam.prompts(5, 11, 2)), "max_new_tokens": 4},
        ):
            assert torch.equal(state_after(**call, do_sample=True), one_draw)
            assert torch.equal(state_after(**call, do_sample=True, seed=3), untouched)
            assert torch.equal(state_after(**call), untouched)
        torch.manual_seed(5)
        duo.engine.submit(prompt["input_ids"], do_sample=True, max_new_tokens=9).result()
        assert torch.equal(torch.get_rng_state(), one_draw)


def test_a_native_call_with_a_seed_leaves_the_global_generator_alone(duo: seam.Duo) -> None:
    before = torch.get_rng_state()
    call = {"do_sample": True, "temperature": 3.0, "guidance_scale": 1.2, "max_new_tokens": NEW}
    first = duo.same(PROMPT, seed=9, native="Guidance", **call)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(duo.same(PROMPT, seed=9, native="Guidance", **call), first)
    assert not torch.equal(duo.same(PROMPT, seed=10, native="Guidance", **call), first)


@pytest.mark.parametrize("seed", [-1, 1 << 63, 1.5, True, "7"])
def test_wrong_seeds(duo: seam.Duo, seed: Any) -> None:
    for call in (duo.served.generate, duo.engine.submit):
        with pytest.raises(seam.hf_cb.InvalidArgumentError, match=r"^seed: takes an integer from 0"):
            call(PROMPT, max_new_tokens=2, do_sample=True, seed=seed)


@pytest.mark.parametrize(
    "warpers",
    [
        [TemperatureLogitsWarper(3.0), TopKLogitsWarper(5)],
        [TopPLogitsWarper(0.6), TemperatureLogitsWarper(3.0)],
        [TemperatureLogitsWarper(3.0), TemperatureLogitsWarper(2.0)],
        [TopKLogitsWarper(5, filter_value=-1.0)],
    ],
    ids=["in their order", "in another order", "twice", "another filter value"],
)
def test_warpers_passed_by_the_caller(duo: seam.Duo, warpers: list[Any]) -> None:
    own = LogitsProcessorList(warpers)
    duo.same(PROMPT, seed=2, do_sample=True, top_k=0, logits_processor=own, max_new_tokens=NEW)


# -- the distribution -----------------------------------------------------------------------------------------------------

DRAWS = 1000


def distance(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Pearson's chi-square of the counts, in standard deviations above what chance gives. Rare tokens share a bin."""
    expected = probabilities.double() * counts.sum()
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]]).clamp_min(1e-9)
    if expected[-1] <= 1e-6:  # nothing is rare but the impossible: not a bin
        observed, expected = observed[:-1], expected[:-1]
    freedom = len(expected) - 1
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


WARPERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 4.0},
    "top_k": {"temperature": 6.0, "top_k": 12},
    "top_p": {"temperature": 6.0, "top_p": 0.6},
    "min_p": {"temperature": 6.0, "min_p": 0.4},
    "typical_p": {"temperature": 6.0, "typical_p": 0.6},
    "top_h": {"temperature": 6.0, "top_h": 0.6},
    "epsilon": {"temperature": 6.0, "epsilon_cutoff": 0.01},
    "eta": {"temperature": 6.0, "eta_cutoff": 0.5},
    "penalty": {"temperature": 4.0, "repetition_penalty": 3.0, "suppress_tokens": list(range(60, 100))},
    "all": {"temperature": 6.0, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 2.0},
}


def draws(duo: seam.Duo, prompt: torch.Tensor, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(how often each token was drawn, the probabilities by plain generate's own scores)."""
    call = {"do_sample": True, "max_new_tokens": 1, "top_k": 0, **options}
    scores = duo.plain.generate(prompt, **call, return_dict_in_generate=True, output_scores=True).scores[0]
    tokens = duo.served.generate(prompt, **call, num_return_sequences=DRAWS, seed=0)[:, -1]
    return torch.bincount(tokens, minlength=models.VOCAB), scores[0].softmax(-1)


def test_distributions_in_one_batch(duo: seam.Duo) -> None:
    prompt = seam.prompts(4)[0][None]
    usual = duo.plain(prompt).logits[0, -1].detach().softmax(-1)
    with ThreadPoolExecutor(len(WARPERS)) as threads:
        found = list(threads.map(lambda options: draws(duo, prompt, options), WARPERS.values()))
    for name, (counts, want) in zip(WARPERS, found, strict=True):
        assert not counts[want == 0].any(), name
        assert distance(counts, want) < 4, name
        assert distance(counts, usual) > 20, name  # it can tell
