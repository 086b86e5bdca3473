"""Several tokens a step: whatever is guessed after a row's last token, its tokens, scores and draws are those without it."""

from __future__ import annotations

from typing import Any

import crowd
import inside
import pytest
import torch
import truth

import hf_cb
from hf_cb.core.sequence import Sequence

pytestmark = pytest.mark.timeout(60)

SITUATIONS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "few tokens a step": {"max_batch_tokens": 9},
    "preempted": {"num_blocks": 18},
    "swapped": {"num_blocks": 18, "swap_space": "1MiB"},
    "launched ahead": {"overlap": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 40, "seed": 3},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "min_new_tokens": 3},
    "scored": {"logprobs": 2, "prompt_logprobs": 1},
}


class Drafts:
    """Guesses from what is known of the answers; of every few tokens one is wrong."""

    def __init__(self, answers: dict[tuple[int, ...], tuple[int, ...]], wrong_every: int) -> None:
        self._answers, self._wrong_every = answers, wrong_every
        self.asked, self.steps = 0, 0

    def __call__(self, seq: Sequence, room: int) -> tuple[int, ...]:
        answer = self._answers[seq.request.prompt]
        done = seq.num_tokens - len(seq.request.prompt)
        guesses = [
            token if place % self._wrong_every else (token + 1) % 50
            for place, token in enumerate(answer[done : done + min(3, room)], done + 1)
        ]
        self.asked += len(guesses)
        return tuple(guesses)


def ask(model: Any, prompts: list[tuple[int, ...]], drafts: Drafts | None, situation: str, options: dict[str, Any]) -> Any:
    with hf_cb.continuous_batching(model, block_size=4, record_steps=1000, **SITUATIONS[situation]) as engine:
        if drafts is not None:
            inside.scheduler(engine)._draft = drafts
        with crowd.held(engine, len(prompts)):
            handles = [engine.submit(prompt, max_new_tokens=12, **options) for prompt in prompts]
        results = [handle.result() for handle in handles]
        return [(r.tokens, r.finish_reason, r.logprobs, r.prompt_logprobs) for r in results], len(engine.steps())


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("kind", OPTIONS)
def test_same_answers(kind: str, situation: str) -> None:
    model, options = truth.model("llama"), OPTIONS[kind]
    prompts = [tuple(row.prompt[0].tolist()) for row in truth.rows("llama")]
    want, num_steps = ask(model, prompts, None, situation, options)
    answers = {tuple(prompt): tokens for prompt, (tokens, *_) in zip(prompts, want, strict=True)}
    for wrong_every in (2, 5, 1000):
        drafts = Drafts(answers, wrong_every)
        got, num_steps_drafted = ask(model, prompts, drafts, situation, options)
        assert [row[:2] for row in got] == [row[:2] for row in want]
        for (*_, logprobs, prompt_logprobs), (*_, own, own_prompt) in zip(got, want, strict=True):
            assert prompt_logprobs is None or len(prompt_logprobs) == len(own_prompt)
            if own is not None:
                torch.testing.assert_close([t.logprob for t in logprobs], [t.logprob for t in own], atol=1e-4, rtol=1e-4)
        assert drafts.asked
    assert situation != "roomy" or num_steps_drafted < num_steps / 2


def test_a_token_that_ends_a_row_in_the_middle_of_drafts() -> None:
    model, row = truth.model("llama"), truth.rows("llama")[0]
    drafts = Drafts({tuple(row.prompt[0].tolist()): tuple(row.tokens)}, 1000)
    for place in range(1, 4):
        end = row.tokens[place]
        with hf_cb.continuous_batching(model, block_size=4) as engine:
            inside.scheduler(engine)._draft = drafts
            result = engine.submit(row.prompt[0], max_new_tokens=12, eos_token_id=end).result()
            assert result.tokens == tuple(row.tokens)[: row.tokens.index(end) + 1]
            result = engine.submit(row.prompt[0], max_new_tokens=place).result()
            assert result.tokens == tuple(row.tokens[:place])
