"""Scores in a form of the caller's own: another width, another dtype, NaN in what is suppressed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import crowd
import inside
import models
import pytest
import seam
import torch
from transformers import LogitsProcessor, PreTrainedModel

import hf_cb
from hf_cb import GenerationHandle

NEW = 6
PROMPTS = [row[None] for row in seam.prompts(6, 17)]
Scores = Callable[[torch.Tensor, torch.Tensor], Any]


@pytest.fixture(scope="module")
def duo() -> Iterator[seam.Duo]:
    with seam.duo() as made:
        yield made


def narrower(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores[:, : models.VOCAB - 30]


def wider(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(scores, (0, 40), value=-50.0)


def narrower_at_times(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores[:, :50] if ids.shape[1] % 2 else scores


def double(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.double() / 3


def half(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.bfloat16()


FORMS: tuple[Scores, ...] = (narrower, wider, narrower_at_times, double, half)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "min_new_tokens": 4, "eos_token_id": list(range(3, 40)), "pad_token_id": 0},
    "sampled": {"do_sample": True, "temperature": 1.7, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2},
    "beams": {"do_sample": False, "num_beams": 3},
}
KEPT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_as_plain_generate_alone_and_in_company(duo: seam.Duo, form: Scores, options: dict[str, Any]) -> None:
    call = {"logits_processor": [form], "max_new_tokens": NEW, **options}
    want = [duo.same(prompt, seed=4, **call, **KEPT)[0].tolist() for prompt in PROMPTS]
    free = duo.plain.generate(PROMPTS[0], max_new_tokens=NEW)[0].tolist()
    calls = [lambda prompt=prompt: duo.served.generate(prompt, seed=4, **call)[0].tolist() for prompt in PROMPTS]
    got = crowd.answers(duo.engine, [*calls, lambda: duo.served.generate(PROMPTS[0], max_new_tokens=NEW)[0].tolist()])
    assert got == [*want, free]


def favourite(token: int, at: int) -> Scores:
    """Chooses a token that the model doesn't have, when there are `at` tokens."""

    def choose(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = wider(ids, scores)
        scores[:, token] = 90.0 if ids.shape[1] == at else -90.0
        return scores

    return choose


@pytest.mark.parametrize("beams", [1, 2])
def test_a_token_that_the_model_does_not_have(duo: seam.Duo, beams: int) -> None:
    """It may be the last; nothing goes on from it. Whoever stands beside it goes on."""
    call = {"do_sample": False, "max_new_tokens": 5, "num_beams": beams}
    last = favourite(models.VOCAB + 5, at=6 + 4)
    assert duo.same(PROMPTS[0], logits_processor=[last], **call)[0, -1] == models.VOCAB + 5
    other = duo.engine.submit(PROMPTS[1], max_new_tokens=40)
    for model in (duo.plain, duo.served):
        with pytest.raises(IndexError, match="index out of range"):
            model.generate(PROMPTS[0], logits_processor=[favourite(models.VOCAB + 5, at=8)], **call)
    assert list(other.result().tokens) == duo.plain.generate(PROMPTS[1], max_new_tokens=40)[0, 17:].tolist()


@pytest.mark.parametrize("form", [lambda i, s: s.expand(2, -1), lambda i, s: s[0], lambda i, s: s.tolist()])
def test_what_plain_generate_refuses_too(duo: seam.Duo, form: Scores) -> None:
    other = duo.engine.submit(PROMPTS[1], max_new_tokens=40)
    for model in (duo.plain, duo.served):
        with pytest.raises((RuntimeError, IndexError, ValueError, TypeError, AttributeError)) as raised:
            model.generate(PROMPTS[0], logits_processor=[form], max_new_tokens=4)
        assert not isinstance(raised.value, hf_cb.HFCBError)
    assert list(other.result().tokens) == duo.plain.generate(PROMPTS[1], max_new_tokens=40)[0, 17:].tolist()


def with_nan(model: PreTrainedModel, *tokens: int) -> None:
    """Let its logits of these tokens be NaN."""
    with torch.no_grad():
        model.lm_head.weight[list(tokens)] = torch.nan


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 9, "top_p": 0.9}])
def test_nan_in_scores_that_are_suppressed(options: dict[str, Any]) -> None:
    with seam.duo() as duo:
        with_nan(duo.plain, 7, 9)
        with_nan(duo.served, 7, 9)  # later than the probe, which would find logits that aren't equal to themselves
        engine = duo.engine
        call = {"max_new_tokens": NEW, **options}
        want = [duo.same(prompt, seed=2, suppress_tokens=[9, 7], **call)[0].tolist() for prompt in PROMPTS]
        for prompt, tokens in zip(PROMPTS, want, strict=True):
            got = engine.generate_batch([prompt], seed=2, suppress_tokens=[9, 7], **call)[0].tokens
            assert list(got) == tokens[prompt.shape[1] :]
        with pytest.raises(hf_cb.RequestFailedError) as raised:  # all of them are over the sum that holds NaN
            engine.submit(PROMPTS[0], suppress_tokens=[9, 7], logprobs=1, **call).result()
        assert isinstance(raised.value.__cause__, FloatingPointError)
        good, bad = engine.submit_batch([PROMPTS[0]], seed=2, suppress_tokens=[9, 7], **call), engine.submit(PROMPTS[1], **call)
        with pytest.raises(hf_cb.RequestFailedError) as raised:
            bad.result()
        assert isinstance(raised.value.__cause__, RuntimeError if options["do_sample"] else FloatingPointError)
        assert list(good[0].result().tokens) == want[0][6:]


def test_a_row_that_is_cancelled_keeps_nobody(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others of its call would wait for its end, and get to their limit."""
    handles: list[GenerationHandle] = []
    with hf_cb.continuous_batching(llama) as engine:
        submit = inside.intake(engine).submit
        monkeypatch.setattr(inside.intake(engine), "submit", lambda requests: handles.extend(submit(requests)) or handles)

        class Cancels(LogitsProcessor):
            supports_continuous_batching = True

            def __call__(self, ids: Any, scores: Any) -> Any:
                if ids.shape[1] == 6:
                    handles[1].cancel()
                return scores

        options: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": 5, "pad_token_id": 0}
        ids = torch.tensor([[1, 2, 3], [4, 9, 6], [7, 8, 9]])
        with pytest.raises(hf_cb.RequestCancelledError):
            llama.generate(ids, max_new_tokens=300, min_new_tokens=300, logits_processor=[Cancels()], **options)
        while engine.stats().blocks_used:
            time.sleep(0.01)
        assert engine.stats().steps < 20
