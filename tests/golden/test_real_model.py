"""The packaged chat model over 64 prompts, in float32: every token is plain `generate()`'s, in every company."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import crowd
import pytest
import torch

import hf_cb
from demo.packaged_model import load
from demo.prompts import QUESTIONS

NUM_THREADS = 16
pytestmark = pytest.mark.timeout(600)  # seconds: plain generate, a row at a time, is the slow part

Prompts = list[dict[str, torch.Tensor]]
Answers = list[list[int]]


@pytest.fixture(scope="module")
def model_and_prompts() -> tuple[Any, Prompts]:
    model, tokenizer = load()
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS[:32]]
    chats += [[{"role": "system", "content": "Answer in one word."}, *chat] for chat in chats]
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True) for chat in chats
    ]
    assert len(prompts) == 64
    return model, prompts


@pytest.fixture(scope="module")
def plain(model_and_prompts: tuple[Any, Prompts]) -> Answers:
    model, prompts = model_and_prompts
    return [answer(model, i, prompt) for i, prompt in enumerate(prompts)]


def answer(model: Any, index: int, prompt: dict[str, torch.Tensor]) -> list[int]:
    out = model.generate(**prompt, max_new_tokens=4 + index % 9, do_sample=False)
    return list(out[0, prompt["input_ids"].shape[1] :].tolist())


def one_by_one(engine: hf_cb.Engine, model: Any, prompts: Prompts) -> Answers:
    return [answer(model, i, prompt) for i, prompt in enumerate(prompts)]


def at_once(engine: hf_cb.Engine, model: Any, prompts: Prompts) -> Answers:
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        with crowd.held(engine, NUM_THREADS):
            answers = threads.map(lambda job: answer(model, *job), enumerate(prompts))
        return list(answers)


def at_random_moments(engine: hf_cb.Engine, model: Any, prompts: Prompts) -> Answers:
    calls = [lambda i=i, p=p: answer(model, i, p) for i, p in enumerate(prompts)]
    return crowd.at_random_moments(calls, last_pause=0.3, num_threads=NUM_THREADS)


@pytest.mark.parametrize(
    ("ask", "options"),
    [
        pytest.param(one_by_one, {}, id="alone"),
        pytest.param(at_random_moments, {}, id="together"),
        pytest.param(at_random_moments, {"max_batch_tokens": 16}, id="token budget 16", marks=pytest.mark.soak),
        pytest.param(at_once, {"num_blocks": 20, "block_size": 8}, id="small pool"),
    ],
)
def test_tokens(
    model_and_prompts: tuple[Any, Prompts],
    plain: Answers,
    ask: Callable[[hf_cb.Engine, Any, Prompts], Answers],
    options: dict[str, int],
) -> None:
    model, prompts = model_and_prompts
    with hf_cb.continuous_batching(model, **options) as engine:
        assert ask(engine, model, prompts) == plain
        stats = engine.stats()
    assert stats.native_calls == {}
    assert stats.output_tokens == sum(map(len, plain))
    assert (stats.preemptions > 0) == ("num_blocks" in options)
