"""What `submit` has beyond transformers' options (biases, penalties of the output, samples of a prompt), in every company."""

from __future__ import annotations

from typing import Any

import crowd
import models
import pytest
import seam
import torch
from transformers import LogitsProcessor, LogitsProcessorList

NEW = 24
PROMPTS = seam.prompts(9, 1, 17, 5)
ENGINES: dict[str, dict[str, Any]] = {"together": {}, "small pool": {"block_size": 4, "num_blocks": 16}}
OPTIONS: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 2.0},
    "both, negative": {"frequency_penalty": -0.4, "presence_penalty": 1.0},
    "bias": {"logit_bias": {5: 6.0, 9: -100.0, 11: 5.5}},
    "all": {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {7: 3.0}},
}
DRAWN: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 12}


class Plainly(LogitsProcessor):
    """Token by token, as OpenAI's documentation puts it; before transformers' own processors."""

    def __init__(self, prompt: int, options: dict[str, Any]) -> None:
        self._prompt, self._options = prompt, options

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores, seen, output = scores.clone(), input_ids[0].tolist(), input_ids[0, self._prompt :].tolist()
        for token, value in self._options.get("logit_bias", {}).items():
            scores[0, token] += value
        for token in set(seen):
            penalty = self._options.get("repetition_penalty", 1.0)
            scores[0, token] = scores[0, token] * penalty if scores[0, token] < 0 else scores[0, token] / penalty
        for token in set(output):
            taken = self._options.get("frequency_penalty", 0.0) * output.count(token)
            scores[0, token] -= taken + self._options.get("presence_penalty", 0.0)
        return scores


def plain(duo: seam.Duo, prompt: torch.Tensor, options: dict[str, Any], seed: int | None) -> list[int]:
    processor = LogitsProcessorList([Plainly(len(prompt), options)])
    with seam.seeded(seed or 0):
        call = {"do_sample": False} if seed is None else DRAWN
        out = duo.plain.generate(prompt[None], max_new_tokens=NEW, logits_processor=processor, **call)
    return list(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_biases_and_penalties(options: dict[str, Any]) -> None:
    calls = [(prompt, own, seed) for own in OPTIONS.values() for seed, prompt in zip((None, 3, None, 5), PROMPTS, strict=True)]
    with seam.duo(options=options) as duo:
        with crowd.held(duo.engine, len(calls)):
            handles = [
                duo.engine.submit(prompt, max_new_tokens=NEW, seed=seed, **own, **({} if seed is None else DRAWN))
                for prompt, own, seed in calls
            ]
        got = [list(handle.result().tokens) for handle in handles]
        assert (duo.engine.stats().preemptions > 0) == ("num_blocks" in options)
        for (prompt, own, seed), tokens in zip(calls, got, strict=True):
            assert tokens == plain(duo, prompt, own, seed), (own, seed)
            assert tokens != plain(duo, prompt, {}, seed), (own, seed)


def test_samples_of_prompts_are_those_of_single_requests_and_share_the_prompt() -> None:
    prompts = seam.prompts(21, 30)
    with seam.duo(options={"block_size": 4}) as duo:
        want = [
            duo.engine.submit(prompt, max_new_tokens=NEW, seed=40 + 3 * i + j, cache_salt=f"{i} {j}", **DRAWN).result().tokens
            for i, prompt in enumerate(prompts)
            for j in range(3)
        ]
        handles = duo.engine.submit_batch(prompts, samples=3, max_new_tokens=NEW, seed=40, **DRAWN)
        results = [handle.result() for handle in handles]
    assert [result.tokens for result in results] == want
    assert len(set(want)) == 6
    assert [result.num_cached_tokens for result in results] == [0, 20, 20, 0, 29, 29]


@pytest.mark.parametrize("samples", [0, -1, 2.5])
def test_wrong_samples(samples: Any) -> None:
    with seam.duo() as duo, pytest.raises(ValueError, match=r"^samples:"):
        duo.engine.submit_batch([[3, 4]], samples=samples)


def test_the_most_tokens() -> None:
    with seam.duo(options={"block_size": 4, "num_blocks": 16}) as duo:
        assert duo.engine.max_tokens == 65
        assert len(duo.engine.submit([3], max_new_tokens=64).result().tokens) == 64
        with pytest.raises(ValueError, match="at most 65 fit"):
            duo.engine.submit([3], max_new_tokens=65)
    with seam.duo(max_position_embeddings=40) as duo:
        assert duo.engine.max_tokens == 40
        assert models.VOCAB > 40
