"""Sixteen threads with sixteen generation configs at once: each gets what its own config asks for."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from serving import SMALL, rows, tiny_llama, together
from transformers import GenerationConfig, PreTrainedModel

import hf_cb

pytestmark = pytest.mark.timeout(20)

NEW = 12
TURNS = 3
EOS: dict[str, Any] = {"eos_token_id": list(range(3, 112, 9)), "pad_token_id": 0}
CONFIGS: list[dict[str, Any]] = [
    {"max_new_tokens": NEW},
    {"max_new_tokens": 5, **EOS},
    {"max_length": 60},
    {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.4, "top_k": 3},
    {"max_new_tokens": NEW, "do_sample": True, "temperature": 3.0, "top_k": 0},
    {"max_new_tokens": NEW, "do_sample": True, "temperature": 2.0, "top_p": 0.4},
    {"max_new_tokens": NEW, "do_sample": True, "temperature": 2.0, "min_p": 0.2},
    {"max_new_tokens": NEW, "do_sample": True, "temperature": 2.0, "typical_p": 0.4},
    {"max_new_tokens": NEW, "do_sample": True, "top_k": 9, "renormalize_logits": True, **EOS},
    {"max_new_tokens": NEW, "repetition_penalty": 1.9},
    {"max_new_tokens": NEW, "no_repeat_ngram_size": 2},
    {"max_new_tokens": NEW, "suppress_tokens": list(range(3, 60))},
    {"max_new_tokens": NEW, "min_new_tokens": 8, **EOS},
    {"max_new_tokens": NEW, "bad_words_ids": [[i] for i in range(60, 112)]},
    {"max_new_tokens": NEW, "num_beams": 2},
    {"max_new_tokens": NEW, "forced_eos_token_id": 7, "max_time": 100.0},
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama()


@functools.cache
def prompt(number: int) -> torch.Tensor:
    return rows()[number].ids[:, :24]


def ask(model: PreTrainedModel, number: int, as_object: bool, generate: Any = None, **seed: int) -> list[int]:
    options = {"generation_config": GenerationConfig(**CONFIGS[number])} if as_object else CONFIGS[number]
    return (generate or model.generate)(prompt(number), **options, **seed)[0].tolist()


def truth(model: PreTrainedModel, number: int, as_object: bool) -> list[int]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        return ask(model, number, as_object, functools.partial(type(model).generate, model))


@pytest.mark.parametrize("as_object", [False, True], ids=["as options", "as configs"])
def test_sixteen_at_once(model: PreTrainedModel, as_object: bool) -> None:
    want = [truth(model, number, as_object) for number in range(16)]
    assert len({tuple(tokens[prompt(i).shape[1] :]) for i, tokens in enumerate(want)}) == 16
    with hf_cb.continuous_batching(model, **SMALL) as engine:
        calls = [
            lambda number=number: [ask(model, number, as_object, seed=number) for _ in range(TURNS)] for number in range(16)
        ]
        assert together(calls) == [[tokens] * TURNS for tokens in want]
        assert engine.stats().native_calls == {}


def test_the_models_own_config_beneath_each_calls(model: PreTrainedModel) -> None:
    own = model.generation_config
    try:
        model.generation_config = GenerationConfig(repetition_penalty=1.4, pad_token_id=0, bos_token_id=1, top_k=7)
        want = [truth(model, number, as_object=True) for number in range(16)]
        with hf_cb.continuous_batching(model, **SMALL):
            calls = [lambda number=number: ask(model, number, as_object=True, seed=number) for number in range(16)]
            assert together(calls) == want
    finally:
        model.generation_config = own


def test_the_global_generator_gives_one_number_to_each_call_that_samples_without_a_seed(model: PreTrainedModel) -> None:
    calls = [number for number, config in enumerate(CONFIGS) if "num_beams" not in config] * 2
    sampled = sum("do_sample" in CONFIGS[number] for number in calls)
    with torch.random.fork_rng(devices=[]), hf_cb.continuous_batching(model, **SMALL):
        torch.manual_seed(9)
        for _ in range(sampled):
            torch.randint(0, 1 << 62, ())
        want = torch.get_rng_state()
        torch.manual_seed(9)
        together([lambda number=number: ask(model, number, as_object=False) for number in calls])
        assert torch.equal(torch.get_rng_state(), want)
