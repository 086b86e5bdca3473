"""Log-probabilities through submit: those of the model's own logits, whatever chunks, neighbours and preemptions."""

from __future__ import annotations

from typing import Any

import crowd
import inside
import models
import pytest
import seam
import torch

from hf_cb.core.output import SchedulerOutput, StepResult
from hf_cb.runtime import logprobs as prompts
from hf_cb.runtime import sampler

NEW = 10
PROMPTS = seam.prompts(9, 1, 17, 5, 12, 2, 14, 8)
ENGINES: dict[str, dict[str, Any]] = {
    "together": {},
    "token budget 8": {"max_batch_tokens": 8},
    "small pool": {"block_size": 4, "num_blocks": 12},
}


def truth(model: Any, ids: list[int]) -> torch.Tensor:
    """[n - 1, vocab]: row i is about token i + 1."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


def check(got: Any, logprobs: torch.Tensor, token: int, count: int) -> None:
    assert got.logprob == pytest.approx(float(logprobs[token]), abs=1e-4)
    values, ids = logprobs.topk(count)
    assert got.top_logprobs == pytest.approx(values.tolist(), abs=1e-4)
    assert list(got.top_ids) == ids.tolist()


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_output_and_prompt(options: dict[str, Any]) -> None:
    with seam.duo(options=options) as duo:
        call = {"max_new_tokens": NEW, "do_sample": True, "temperature": 2.0, "repetition_penalty": 1.3}
        with crowd.held(duo.engine, len(PROMPTS)):
            handles = [
                duo.engine.submit(prompt, seed=i, logprobs=i % 4, prompt_logprobs=i % 3, **call)
                for i, prompt in enumerate(PROMPTS)
            ]
        plain = duo.engine.submit(PROMPTS[0], seed=0, **call).result()
        results = [handle.result() for handle in handles]
        assert (duo.engine.stats().preemptions > 0) == ("num_blocks" in options)
    assert plain.tokens == results[0].tokens
    assert plain.logprobs is plain.prompt_logprobs is None
    for i, (prompt, result) in enumerate(zip(PROMPTS, results, strict=True)):
        ids = [*prompt.tolist(), *result.tokens]
        logprobs, n = truth(duo.plain, ids), len(prompt)
        assert result.logprobs is not None
        assert result.prompt_logprobs is not None
        assert (len(result.prompt_logprobs), len(result.logprobs)) == (n, NEW)
        assert result.prompt_logprobs[0] is None
        for place, got in enumerate(result.prompt_logprobs[1:]):
            check(got, logprobs[place], ids[place + 1], i % 3)
        for place, got in enumerate(result.logprobs, start=n - 1):
            check(got, logprobs[place], ids[place + 1], i % 4)


def test_more_than_the_vocabulary_has() -> None:
    with seam.duo() as duo:
        result = duo.engine.submit(PROMPTS[0], max_new_tokens=2, logprobs=1000).result()
    assert result.logprobs is not None
    assert [len(place.top_ids) for place in result.logprobs] == [models.VOCAB] * 2


def test_one_that_ends_at_once() -> None:
    with seam.duo() as duo:
        call = {"max_new_tokens": NEW, "eos_token_id": list(range(models.VOCAB))}
        result = duo.engine.submit(PROMPTS[2], prompt_logprobs=2, **call).result()
    assert result.logprobs is None
    assert result.prompt_logprobs is not None
    assert (len(result.tokens), len(result.prompt_logprobs)) == (1, 17)


def test_a_prompt_that_the_prefix_cache_knows() -> None:
    """Its keys and values are there, its logits are not."""
    with seam.duo(options={"block_size": 4}) as duo:
        first = duo.engine.submit(PROMPTS[2], max_new_tokens=NEW).result()
        again = duo.engine.submit(PROMPTS[2], max_new_tokens=NEW).result()
        asked = duo.engine.submit(PROMPTS[2], max_new_tokens=NEW, prompt_logprobs=1).result()
    assert (first.num_cached_tokens, again.num_cached_tokens, asked.num_cached_tokens) == (0, 16, 0)
    assert first.tokens == again.tokens == asked.tokens
    logprobs = truth(duo.plain, [*PROMPTS[2].tolist(), *asked.tokens])
    assert asked.prompt_logprobs is not None
    for place, got in enumerate(asked.prompt_logprobs[1:]):
        check(got, logprobs[place], int(PROMPTS[2][place + 1]), 1)


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_samples_of_one_prompt(options: dict[str, Any]) -> None:
    """Each has the whole prompt's, though keys and values are shared where nobody asks."""
    with seam.duo(options=options) as duo:
        call = {"max_new_tokens": 4, "do_sample": True, "seed": 3}
        handles = duo.engine.submit_batch([PROMPTS[2], PROMPTS[1]], 3, prompt_logprobs=1, **call)
        results = [handle.result() for handle in handles]
        plain = [handle.result().tokens for handle in duo.engine.submit_batch([PROMPTS[2], PROMPTS[1]], 3, **call)]
    assert [result.tokens for result in results] == plain
    for i, result in enumerate(results):
        ids = PROMPTS[2 if i < 3 else 1].tolist()
        assert result.prompt_logprobs is not None
        assert len(result.prompt_logprobs) == len(ids)
        for place, got in enumerate(result.prompt_logprobs[1:]):
            check(got, truth(duo.plain, ids)[place], ids[place + 1], 1)


def test_a_step_that_is_computed_in_parts_gives_all_that_belongs_to_its_tokens() -> None:
    """As after a failure whose culprit is not known yet: log-probabilities, and who stops by rules of its own."""
    with seam.duo() as duo:
        runner = inside.runner(duo.engine)  # type: ignore[union-attr]
        execute = runner.execute

        def one_at_a_time(output: SchedulerOutput) -> StepResult:
            if len(output.rows) > 1:
                raise RuntimeError("too many")
            return execute(output)

        runner.execute = one_at_a_time  # type: ignore[method-assign]
        handles = [duo.engine.submit(prompt, max_new_tokens=NEW, logprobs=0) for prompt in PROMPTS[:3]]
        duo.same(PROMPTS[3][None], max_new_tokens=40, stopping_criteria=[lambda ids, scores, **_: ids.shape[1] >= 9])
        for prompt, handle in zip(PROMPTS, handles, strict=False):
            result = handle.result()
            logprobs = truth(duo.plain, [*prompt.tolist(), *result.tokens])
            assert result.logprobs is not None
            for place, got in enumerate(result.logprobs, start=len(prompt) - 1):
                check(got, logprobs[place], result.tokens[place - len(prompt) + 1], 0)


@pytest.mark.parametrize("module", [prompts, sampler], ids=["prompt", "output"])
@pytest.mark.parametrize("overlap", [False, True])
def test_too_little_memory_for_them_makes_no_draw_twice(module: Any, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of those who ask nor of who is in the same step."""
    call = {"max_new_tokens": NEW, "do_sample": True, "temperature": 2.0, "min_new_tokens": 3}
    with seam.duo(options={"overlap": overlap}) as duo:
        wanted = [duo.engine.submit(prompt, seed=i, **call).result().tokens for i, prompt in enumerate(PROMPTS[:4])]
        compute, failures = module.token_logprobs, [torch.OutOfMemoryError("no memory")] * 2

        def fail(*args: Any) -> Any:
            if failures and len(args[1]) > 1:
                raise failures.pop()
            return compute(*args)

        monkeypatch.setattr(module, "token_logprobs", fail)
        with crowd.held(duo.engine, 4):
            handles = [
                duo.engine.submit(prompt, seed=i, **call, **({"logprobs": 1, "prompt_logprobs": 1} if i % 2 == 0 else {}))
                for i, prompt in enumerate(PROMPTS[:4])
            ]
        assert [handle.result().tokens for handle in handles] == wanted
        assert not failures
