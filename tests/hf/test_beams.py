"""Beam search in the engine: tokens, scores and beam indices are plain generate's, alone, in company and under pressure."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import crowd
import inside
import models
import pytest
import seam
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import hf_cb

pytestmark = pytest.mark.timeout(20)

NEW = 12
ENDS = {"eos_token_id": [5, 6, 7, 8, 9, 10, 11, 12], "pad_token_id": 0}
OFTEN = {"eos_token_id": list(range(3, models.VOCAB, 3)), "pad_token_id": 0}
SEARCHES: dict[str, dict[str, Any]] = {
    "two": {"num_beams": 2},
    "the best three": {"num_beams": 4, "num_return_sequences": 3},
    "ends": {"num_beams": 3, **ENDS},
    "ends early": {"num_beams": 3, "early_stopping": True, **ENDS},
    "never stops early": {"num_beams": 3, "early_stopping": "never", "length_penalty": 2.0, **OFTEN},
    "short is better": {"num_beams": 3, "length_penalty": -1.0, **OFTEN},
    "no length penalty": {"num_beams": 3, "length_penalty": 0.0, "early_stopping": "never", **ENDS},
    "one of many ends": {"num_beams": 5, "num_return_sequences": 5, "early_stopping": True, **OFTEN},
    "samples": {"num_beams": 3, "do_sample": True, "temperature": 2.0, "top_k": 0},
    "samples that end": {"num_beams": 2, "do_sample": True, "top_p": 0.9, "num_return_sequences": 2, **ENDS},
    "penalties": {"num_beams": 3, "repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "bad_words_ids": [[8], [5, 6]]},
    "limits": {"num_beams": 3, "min_new_tokens": 5, "suppress_tokens": [3, 4, 5], "forced_eos_token_id": 7, **ENDS},
    "normal": {"num_beams": 3, "renormalize_logits": True, "sequence_bias": [[[9], 3.0]], "typical_p": 0.8},
    "pad and no end": {"num_beams": 2, "pad_token_id": 4},
}
ENGINES: dict[str, dict[str, Any]] = {
    "together": {},
    "token budget 8": {"max_batch_tokens": 8},
    "small pool": {"block_size": 4, "num_blocks": 26},
    "small pool with swapping": {"block_size": 4, "num_blocks": 26, "swap_space": "1MiB"},
    "no prefix cache": {"block_size": 4, "prefix_cache": False},
    "few seats": {"max_batch_size": 6, "block_size": 8},
    "fair and paced": {"policy": "fair", "target_itl_ms": 5, "block_size": 4, "num_blocks": 40},
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", SEARCHES)
def test_sequences(duo: seam.Duo, name: str, rows: int) -> None:
    batch, call = seam.left_padded(seam.prompts(5, 11, 2)[:rows]), SEARCHES[name]
    if call.get("do_sample") and rows > 1:
        served = duo.served.generate(**batch, max_new_tokens=NEW, seed=40, **call)
        for i in range(rows):  # each prompt draws as if it were alone
            alone = {key: value[i : i + 1] for key, value in batch.items()}
            want = duo.same(**alone, max_new_tokens=NEW, seed=40 + i, **call)
            best = call.get("num_return_sequences", 1)
            assert torch.equal(served[i * best : (i + 1) * best, : want.shape[1]], want)
        return
    duo.same(**batch, max_new_tokens=NEW, seed=1, **call)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", SEARCHES)
def test_scores_logits_and_indices(duo: seam.Duo, name: str, rows: int) -> None:
    """Of several prompts, too, which go on until the last search has ended."""
    kept = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    call = {**SEARCHES[name], **kept, "max_new_tokens": NEW}
    if call.get("do_sample") and rows > 1:  # each prompt has draws of its own
        call |= {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    batch = seam.left_padded(seam.prompts(7, 12, 4)[:rows])
    with seam.seeded(3):
        want = duo.plain.generate(**batch, **call)
    with duo.native_calls() as reasons:
        got = duo.served.generate(**batch, seed=3, **call)
    assert not reasons
    assert type(got) is type(want)
    assert torch.equal(got.sequences, want.sequences)
    assert torch.equal(got.beam_indices, want.beam_indices)
    assert got.beam_indices.dtype == want.beam_indices.dtype
    torch.testing.assert_close(got.sequences_scores, want.sequences_scores, atol=1e-4, rtol=1e-5)
    for ours, theirs in ((got.scores, want.scores), (got.logits, want.logits)):
        assert len(ours) == len(theirs)
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), atol=1e-3, rtol=1e-4)


def test_several_prompts_in_a_dict(duo: seam.Duo) -> None:
    call = {"num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True, "max_new_tokens": NEW, **ENDS}
    batch = seam.left_padded(seam.prompts(5, 11, 2))
    want, got = (model.generate(**batch, **call) for model in (duo.plain, duo.served))
    assert torch.equal(got.sequences, want.sequences)
    assert torch.equal(got.beam_indices, want.beam_indices)
    assert got.scores is got.logits is got.sequences_scores is want.scores is want.sequences_scores is None


@pytest.mark.parametrize("engine", ENGINES)
def test_in_company(duo: seam.Duo, engine: str) -> None:
    """All searches at once, from a thread each, with rows without beams between them."""
    prompts = seam.prompts(*range(3, 3 + len(SEARCHES)))
    jobs: list[dict[str, Any]] = [{"input_ids": p[None], **call} for p, call in zip(prompts, SEARCHES.values(), strict=True)]
    jobs += [{"input_ids": p[None]} for p in seam.prompts(9, 4, 15, 2)]
    forks = {"input_ids": seam.prompts(13)[0][None], "do_sample": True, "max_new_tokens": NEW}
    with seam.duo(options=ENGINES[engine]) as made:
        calls = [lambda job=job: made.served.generate(**job, max_new_tokens=NEW, seed=3) for job in jobs]
        *got, samples = crowd.answers(
            made.engine, [*calls, lambda: made.served.generate(**forks, num_return_sequences=3, seed=3)]
        )
        stats = made.engine.stats()
    assert stats.native_calls == {}
    assert (stats.preemptions > 0) == ("num_blocks" in ENGINES[engine])
    for i, row in enumerate(samples):
        assert torch.equal(row, duo.served.generate(**forks, seed=3 + i)[0])
    for job, answer in zip(jobs, got, strict=True):
        with seam.seeded(3):
            want = duo.plain.generate(**job, max_new_tokens=NEW)
        assert torch.equal(answer[: len(want)], want)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3_text", "gpt_oss", "gpt2", "qwen2_moe", "llama4_text"])
def test_other_models(name: str) -> None:
    """Windows, caps, sinks, learned positions, experts: with prompts longer than the window, and preemption."""
    with seam.duo(name, options={"block_size": 4, "num_blocks": 16}) as duo:
        prompts = seam.prompts(21, 5, 14, 18)
        answers = crowd.answers(
            duo.engine,
            [lambda p=p: duo.served.generate(p[None], num_beams=3, max_new_tokens=NEW) for p in prompts],
        )
        for prompt, got in zip(prompts, answers, strict=True):
            assert torch.equal(got, duo.plain.generate(prompt[None], num_beams=3, max_new_tokens=NEW))
        assert duo.engine.stats().native_calls == {}
        assert duo.engine.stats().preemptions > 0


def test_beams_share_blocks() -> None:
    """Four beams of a long prompt take little more room than one row; samples fork from the first's prompt."""
    prompt = seam.prompts(61)[0][None]
    with seam.duo(options={"block_size": 4, "num_blocks": 64, "record_steps": 100, "prefix_cache": False}) as duo:
        duo.same(prompt, num_beams=4, max_new_tokens=NEW)
        assert max(record.blocks_used for record in duo.engine.steps()) <= 16 + 4 * 4
        assert duo.engine.stats().preemptions == 0
        call = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": NEW}
        before = duo.engine.stats()
        served = duo.served.generate(prompt, seed=8, **call)
        for i, row in enumerate(served):
            duo_row = duo.served.generate(prompt, seed=8 + i, do_sample=True, max_new_tokens=NEW)
            assert torch.equal(row, duo_row[0])
        assert duo.engine.stats().cached_tokens - before.cached_tokens == 3 * 60  # all but the prompt's last token
        assert duo.engine.stats().blocks_used == 0


FEW = {  # fewer tokens than candidates are left: beams without a way on are among those that are kept
    "top k": {"do_sample": True, "num_beams": 3, "top_k": 2},
    "prefix": {"num_beams": 3, "prefix_allowed_tokens_fn": lambda i, sentence: [5, 6]},
    "many ends": {"num_beams": 2, "eos_token_id": list(range(3, models.VOCAB - 1)), "pad_token_id": 0},
    "one token": {"num_beams": 4, "prefix_allowed_tokens_fn": lambda i, sentence: [9]},
    "suppressed": {"num_beams": 3, "suppress_tokens": list(range(8, models.VOCAB))},
}


@pytest.mark.parametrize("name", FEW)
def test_fewer_tokens_than_candidates(duo: seam.Duo, name: str) -> None:
    for length in (5, 11):
        duo.same(seam.prompts(length)[0][None], max_new_tokens=NEW, seed=3, **FEW[name])


def test_several_prompts_of_which_one_finds_no_way_on(duo: seam.Duo) -> None:
    batch = seam.left_padded(seam.prompts(5, 5))
    call = {"num_beams": 4, "num_return_sequences": 3, "eos_token_id": 5, "pad_token_id": 4, "early_stopping": True}
    duo.same(**batch, **call, max_new_tokens=6, prefix_allowed_tokens_fn=lambda i, _: [[5], [20, 21]][i], native="no way on")
    kept = {"return_dict_in_generate": True, "output_scores": True}
    duo.same(**batch, **call, **kept, max_new_tokens=6, prefix_allowed_tokens_fn=lambda i, _: [[5], [20, 21]][i])


def test_a_default_dtype(duo: seam.Duo) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        kept = {"return_dict_in_generate": True, "output_scores": True}
        want, got = (m.generate(seam.PROMPT, num_beams=2, max_new_tokens=5, **kept) for m in (duo.plain, duo.served))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got.sequences, want.sequences)
    assert got.sequences_scores.dtype == want.sequences_scores.dtype == torch.float32


class OneNaN(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 9] = torch.nan
        return scores


def test_nan_of_a_processors_own(duo: seam.Duo) -> None:
    duo.same(seam.PROMPT, num_beams=2, max_new_tokens=3, logits_processor=LogitsProcessorList([OneNaN()]))


def test_nan_of_the_models_fails_its_request_alone() -> None:
    with seam.duo() as duo, torch.no_grad():
        duo.served.get_input_embeddings().weight[3].fill_(torch.nan)
        with pytest.raises(hf_cb.RequestFailedError, match="logits hold NaN"):
            duo.served.generate(torch.tensor([[3, 5, 7]]), num_beams=2, max_new_tokens=3)
        duo.same(torch.tensor([[4, 5, 7]]), num_beams=2, max_new_tokens=3, suppress_tokens=[3])


def test_a_choice_is_not_lost_when_the_rest_of_the_step_fails(duo: seam.Duo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part is computed again: nothing of it may have been chosen before."""
    from hf_cb.runtime import model_runner

    choose, prompts = model_runner.choose, seam.prompts(6, 7)
    failures = [MemoryError("once")]

    def fails_once(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return choose(*args)

    monkeypatch.setattr(model_runner, "choose", fails_once)
    calls = [{"num_beams": 3}, {}]
    jobs = [lambda p=p, c=c: duo.served.generate(p[None], max_new_tokens=6, **c) for p, c in zip(prompts, calls, strict=True)]
    got = crowd.answers(duo.engine, jobs)
    for prompt, call, out in zip(prompts, calls, got, strict=True):
        assert torch.equal(out, duo.plain.generate(prompt[None], max_new_tokens=6, **call))
    assert not failures


class Note(LogitsProcessor):
    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids.tolist())
        assert not scores.is_inference()
        return scores


class StopAfter(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append(tuple(input_ids.shape))
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_own_processors_and_criteria_see_all_beams(duo: seam.Duo) -> None:
    """As in plain generate: every call's rows, in their order, once per step."""
    prompt, notes = seam.PROMPT, []
    before = duo.engine.stats().native_calls
    for model in (duo.plain, duo.served):
        note, stop = Note(), StopAfter(13)
        out = model.generate(
            prompt,
            num_beams=3,
            max_new_tokens=20,
            logits_processor=LogitsProcessorList([note]),
            stopping_criteria=StoppingCriteriaList([stop]),
        )
        notes.append((note.seen, stop.calls, out.tolist()))
    assert notes[0] == notes[1]
    assert duo.engine.stats().native_calls == before


class Raises(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > 9:
            raise KeyError("mine")
        return scores


def test_an_error_is_the_callers_alone(duo: seam.Duo) -> None:
    prompt = seam.PROMPT
    with ThreadPoolExecutor(2) as threads:
        with crowd.held(duo.engine, 2):
            raising = threads.submit(
                duo.served.generate, prompt, num_beams=3, max_new_tokens=NEW, logits_processor=LogitsProcessorList([Raises()])
            )
            other = threads.submit(duo.served.generate, prompt, num_beams=3, max_new_tokens=NEW)
        with pytest.raises(KeyError, match="mine"):
            raising.result()
        assert torch.equal(other.result(), duo.plain.generate(prompt, num_beams=3, max_new_tokens=NEW))
    assert duo.engine.stats().blocks_used == 0


def test_a_timeout_ends_all_beams(duo: seam.Duo) -> None:
    with pytest.raises(hf_cb.RequestTimeoutError):
        duo.served.generate(seam.PROMPT, num_beams=3, max_new_tokens=100, timeout=0.02)
    duo.same(seam.PROMPT, num_beams=3, max_new_tokens=NEW)
    assert duo.engine.stats().blocks_used == duo.engine.stats().running == 0


def test_what_the_engine_has_no_room_for_runs_natively() -> None:
    prompt = seam.prompts(9)[0][None]
    with seam.duo(options={"max_batch_size": 4, "block_size": 4, "num_blocks": 14}) as duo:
        duo.same(prompt, num_beams=4, max_new_tokens=8)
        duo.same(prompt, num_beams=5, max_new_tokens=8, native="num_beams: 5 beams")
        duo.same(prompt, num_beams=4, max_new_tokens=20, native="num_beams: 4 beams of 29 tokens can take 22 blocks")


@pytest.mark.timeout(60)
def test_random_searches_and_samples_in_a_small_pool(duo: seam.Duo) -> None:
    """Sixty calls of all kinds, of which some share prompts, a few at a time, with recomputation and prefix hits."""
    chance, prompts = random.Random(5), seam.prompts(3, 6, 9, 12, 15)

    def job() -> dict[str, Any]:
        call: dict[str, Any] = {"input_ids": chance.choice(prompts)[None], "max_new_tokens": chance.randint(1, 10)}
        kind = chance.choice(["beams", "beams", "beam samples", "samples", "greedy"])
        if "beam" in kind:
            call |= {"num_beams": chance.randint(2, 5), "length_penalty": chance.choice([0.0, 1.0, 2.0])}
        if "sample" in kind:
            call |= {"do_sample": True, "temperature": 1.5}
        return call | chance.choice([{}, ENDS, OFTEN])

    jobs = [job() for _ in range(60)]
    options = {"block_size": 4, "num_blocks": 20, "max_batch_tokens": 24, "max_batch_size": 16}
    with seam.duo(options=options) as made, ThreadPoolExecutor(12) as threads:
        with crowd.held(made.engine, 12):
            answers = threads.map(lambda call: made.served.generate(**call, seed=11), jobs)
        got = list(answers)
        stats = made.engine.stats()
        inside.scheduler(made.engine).check()
    for call, answer in zip(jobs, got, strict=True):
        with seam.seeded(11):
            assert torch.equal(answer, duo.plain.generate(**call))
    assert stats.native_calls == {}
    assert stats.preemptions > 0
    assert stats.blocks_used == 0
