"""Every option that chooses tokens or ends a row: plain generate's answer alone, in company, in chunks, when preempted."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import crowd
import models
import pytest
import seam
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

NEW = 14
END = list(range(3, models.VOCAB, 9))
SAMPLE: dict[str, Any] = {"do_sample": True, "temperature": 3.0, "top_k": 0}
ENDS: dict[str, Any] = {"eos_token_id": END, "pad_token_id": 0}
OFTEN: dict[str, Any] = {"eos_token_id": list(range(3, models.VOCAB, 2)), "pad_token_id": 0}


class Shift(LogitsProcessor):
    """Depends on the whole history, on its order and on its length."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        weights = torch.arange(1, input_ids.shape[1] + 1)
        return scores.roll(int((input_ids * weights).sum()) % 5, dims=-1)


class InPlace(LogitsProcessor):
    """Writes into what it is given."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, input_ids[0, -1] :: 2] -= 4.0
        return scores


class StopAtSum(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.sum(dim=1) % 3 == 0


def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
    return list(range(3 + (batch_id + int(ids[-1])) % 5, models.VOCAB, 5))


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {**SAMPLE},
    "top_k": {**SAMPLE, "top_k": 4},
    "top_p": {**SAMPLE, "top_p": 0.5},
    "top_h": {**SAMPLE, "top_h": 0.4},
    "min_p": {**SAMPLE, "min_p": 0.3},
    "typical_p": {**SAMPLE, "typical_p": 0.5},
    "epsilon": {**SAMPLE, "epsilon_cutoff": 0.02},
    "eta": {**SAMPLE, "eta_cutoff": 0.3},
    "warpers": {"do_sample": True, "temperature": 4.0, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "repetition and warpers": {**SAMPLE, "repetition_penalty": 1.8, "top_k": 9, "min_new_tokens": 3, **ENDS},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {**SAMPLE, "encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[i] for i in range(3, 50)] + [[60, 61], [70, 71, 72]]},
    "sequence_bias": {"sequence_bias": [[[i], 3.0 - i % 7] for i in range(3, 90)] + [[[5, 9], -9.0]]},
    "suppress_tokens": {"suppress_tokens": list(range(3, 60))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(60, 112))},
    "forced_bos_token_id": {"forced_bos_token_id": 5},
    "forced_eos_token_id": {"forced_eos_token_id": 7},
    "exponential_decay": {"exponential_decay_length_penalty": (1, 3.0), **ENDS},
    "min_length": {"min_length": 14, **OFTEN},
    "min_new_tokens": {"min_new_tokens": 6, **OFTEN},
    "renormalize_logits": {**SAMPLE, "top_k": 8, "renormalize_logits": True},
    "remove_invalid_values": {"remove_invalid_values": True},
    "watermarking": {"watermarking_config": WatermarkingConfig(bias=9.0)},
    "watermarking by itself": {**SAMPLE, "watermarking_config": WatermarkingConfig(seeding_scheme="selfhash")},
    "synthid": {
        **SAMPLE,
        "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[6, 28, 4], sampling_table_size=512),
    },
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allowed},
    "logits_processor": {"logits_processor": LogitsProcessorList([Shift(), InPlace()])},
    "processor with warpers": {**SAMPLE, "top_k": 5, "logits_processor": LogitsProcessorList([Shift()])},
    "stopping_criteria": {"stopping_criteria": StoppingCriteriaList([StopAtSum()])},
    "max_time": {"max_time": 1000.0},
    "stop_strings": {"stop_strings": [f"w{i}" for i in range(3, 112, 2)], "tokenizer": seam.word_tokenizer()},
    "eos": {**ENDS},
}


@dataclass(frozen=True)
class Case:
    prompt: torch.Tensor  # [1, n]
    seed: int
    options: dict[str, Any]

    def plain(self, duo: seam.Duo) -> list[int]:
        with seam.seeded(self.seed):
            return duo.plain.generate(self.prompt, max_new_tokens=NEW, **self.options)[0].tolist()

    def served(self, duo: seam.Duo) -> list[int]:
        return duo.served.generate(self.prompt, max_new_tokens=NEW, seed=self.seed, **self.options)[0].tolist()


PROMPTS = [row[None] for row in seam.prompts(*range(1, 10))]
CASES = {
    name: Case(PROMPTS[0 if name == "forced_bos_token_id" else i % 9], i, options)
    for i, (name, options) in enumerate(OPTIONS.items())
}
ENGINES: dict[str, dict[str, Any]] = {
    "together": {},
    "token budget 8": {"max_batch_tokens": 8},
    "small pool": {"block_size": 4, "num_blocks": 10},
}


@pytest.mark.parametrize("name", CASES)
def test_alone(duo: seam.Duo, name: str) -> None:
    with duo.native_calls() as reasons:
        assert CASES[name].served(duo) == CASES[name].plain(duo)
    assert not reasons


def test_every_option_changes_something(duo: seam.Duo) -> None:
    """Each is told from the same call without it; but for two that only guard, and whose effect others show."""
    base = [*SAMPLE.items(), *ENDS.items(), *OFTEN.items()]
    for name, case in CASES.items():
        kept = {
            key: value for key, value in case.options.items() if (key, value) in base and name not in ("temperature", "eos")
        }
        if name not in ("greedy", "max_time", "remove_invalid_values"):
            assert Case(case.prompt, case.seed, kept).plain(duo) != case.plain(duo), name


@pytest.mark.parametrize("engine", ENGINES)
def test_in_company(duo: seam.Duo, engine: str) -> None:
    """All options at once, from a thread each, so that every row has neighbours with others."""
    with seam.duo(options=ENGINES[engine]) as made:
        got = crowd.answers(made.engine, [lambda case=case: case.served(made) for case in CASES.values()])
        stats = made.engine.stats()
    for (name, case), tokens in zip(CASES.items(), got, strict=True):
        assert tokens == case.plain(duo), name
    assert stats.native_calls == {}
    assert stats.mean_batch_size > 4 if engine == "together" else True
    assert (stats.preemptions > 0) == (engine == "small pool")


ACROSS_ROWS = ("logits_processor", "processor with warpers", "stopping_criteria")  # native for several rows


@pytest.mark.parametrize("name", [name for name in CASES if name not in (*ACROSS_ROWS, "max_time", "forced_bos_token_id")])
def test_rows_of_a_padded_batch(duo: seam.Duo, name: str) -> None:
    """Each row is what plain generate gives it alone, as it stands in the batch: with its padding."""
    batch, options = seam.left_padded(seam.prompts(4, 9, 1)), {**ENDS, **CASES[name].options}
    with duo.native_calls() as reasons:
        got = duo.served.generate(**batch, max_new_tokens=NEW, seed=40, **options)
    assert not reasons
    for i, row in enumerate(got.tolist()):
        alone = {key: value[i : i + 1] for key, value in batch.items()}
        if "prefix_allowed_tokens_fn" in options:
            options["prefix_allowed_tokens_fn"] = lambda _, ids, i=i: allowed(i, ids)
        with seam.seeded(40 + i):
            want = duo.plain.generate(**alone, max_new_tokens=NEW, **options)[0].tolist()
        assert row == want + [0] * (len(row) - len(want))


def test_several_sequences_of_a_prompt(duo: seam.Duo) -> None:
    """A prefix function is told the prompt's number, not the row's."""
    batch = seam.left_padded(seam.prompts(4, 9))
    asked: list[int] = []

    def note(batch_id: int, ids: torch.Tensor) -> list[int]:
        asked.append(batch_id)
        return allowed(batch_id, ids)

    options = {**SAMPLE, "num_return_sequences": 3, "max_new_tokens": 5, "encoder_repetition_penalty": 3.0}
    got = duo.served.generate(**batch, **options, seed=4, prefix_allowed_tokens_fn=note)
    assert sorted(asked) == [0] * 15 + [1] * 15
    for i, row in enumerate(got):
        assert all(token % 5 == (3 + (i // 3 + last) % 5) % 5 for last, token in pairwise(row[8:].tolist()))


@pytest.mark.parametrize("kept", [("scores",), ("logits",), ("scores", "logits")], ids="+".join)
@pytest.mark.parametrize("options", [{}, {**SAMPLE, "top_k": 5, "renormalize_logits": True}, CASES["logits_processor"].options])
def test_scores_and_logits(duo: seam.Duo, kept: tuple[str, ...], options: dict[str, Any]) -> None:
    call = {"max_new_tokens": 6, "return_dict_in_generate": True, **{f"output_{name}": True for name in kept}, **options}
    inputs = [{"input_ids": PROMPTS[6]}, seam.left_padded(seam.prompts(4, 9, 1))]
    for given in inputs[:1] if "logits_processor" in options else inputs:
        want = duo.plain.generate(**given, **{**call, "do_sample": False})
        with duo.native_calls() as reasons:
            got = duo.served.generate(**given, **{**call, "do_sample": False})
        assert not reasons
        assert torch.equal(got.sequences, want.sequences)
        for name in ("scores", "logits"):
            values, truth = getattr(got, name), getattr(want, name)
            assert (values is None) == (truth is None) == (name not in kept)
            if values is not None:
                assert [(v.shape, v.dtype) for v in values] == [(t.shape, t.dtype) for t in truth]
                torch.testing.assert_close(torch.stack(values), torch.stack(truth), atol=1e-4, rtol=1e-4)
                assert not any(v.is_inference() for v in values)


APART: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.4, "min_new_tokens": 4},
    "sampling": {**SAMPLE, "top_k": 20, "top_p": 0.9},
}


@pytest.mark.parametrize("engine", [{}, {"max_batch_size": 8, "num_blocks": 5}, {"max_batch_tokens": 8}], ids=str)
def test_scores_of_rows_that_end_apart(duo: seam.Duo, engine: dict[str, Any]) -> None:
    """Eight rows, at different paces, go on with pad tokens until the last has ended, and no further."""
    rows = seam.left_padded(seam.prompts(6, 9, 3, 4, 12, 5, 7, 2))
    kept = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    ends = {"eos_token_id": list(range(20, 45)), "pad_token_id": 0, "max_new_tokens": 14}
    with seam.duo(options=engine) as made:
        for options in APART.values():
            streamer = seam.Recorder()
            with made.native_calls() as reasons:
                got = made.served.generate(**rows, **kept, **ends, **options, seed=4, streamer=streamer)
            assert not reasons
            if "do_sample" not in options:
                recorder = seam.Recorder()
                want = duo.plain.generate(**rows, **kept, **ends, **options, streamer=recorder)
                assert torch.equal(got.sequences, want.sequences)
                assert streamer.events == recorder.events
                for name in ("scores", "logits"):
                    ours, theirs = torch.stack(getattr(got, name)), torch.stack(getattr(want, name))
                    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
                continue
            assert len(got.scores) == got.sequences.shape[1] - 12
            for i in range(8):
                alone = {name: value[i : i + 1] for name, value in rows.items()}
                with seam.seeded(4 + i):
                    want = duo.plain.generate(**alone, **kept, **ends, **options)
                length = want.sequences.shape[1]
                assert torch.equal(got.sequences[i, :length], want.sequences[0])
                assert not got.sequences[i, length:].any()
                for ours, theirs in zip(got.scores, want.scores, strict=False):
                    torch.testing.assert_close(ours[i], theirs[0], atol=1e-4, rtol=1e-4)


def test_transition_scores(duo: seam.Duo) -> None:
    call = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_scores": True, "repetition_penalty": 1.5}
    want, got = (model.generate(PROMPTS[5], **call) for model in (duo.plain, duo.served))
    scores = [duo.plain.compute_transition_scores(out.sequences, out.scores, normalize_logits=True) for out in (want, got)]
    torch.testing.assert_close(scores[1], scores[0], atol=1e-4, rtol=1e-4)
