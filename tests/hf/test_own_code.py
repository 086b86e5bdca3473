"""Processors and criteria of the caller's: on the engine's thread, once per token with the whole history, and their errors."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import crowd
import models
import pytest
import seam
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)

import hf_cb
from hf_cb.hf.calls import rules

NEW = 12
PROMPTS = [row[None] for row in seam.prompts(6, 17, 3, 11, 8, 14, 5, 9)]


@pytest.fixture(scope="module")
def duo() -> Iterator[seam.Duo]:
    with seam.duo() as made:
        yield made


class Note(LogitsProcessor, StoppingCriteria):
    """Keeps the history that each call was given, as a processor and as a criterion."""

    def __init__(self) -> None:
        self.processed: list[list[int]] = []
        self.judged: list[list[int]] = []
        self.threads: set[str] = set()

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        assert input_ids.shape[0] == 1
        assert not torch.is_grad_enabled()
        if isinstance(scores, torch.Tensor):
            assert scores.is_inference() == torch.is_inference_mode_enabled()
            assert scores.dtype == torch.float32
            self.processed.append(input_ids[0].tolist())
            return scores
        self.judged.append(input_ids[0].tolist())
        return torch.tensor([False])


@pytest.mark.parametrize(
    "options",
    [{}, {"max_batch_tokens": 5}, {"block_size": 4, "num_blocks": 12}],
    ids=["together", "small budget", "small pool"],
)
def test_once_per_token_with_the_whole_history(options: dict[str, Any]) -> None:
    with seam.duo(options=options) as duo:

        def call(prompt: torch.Tensor) -> tuple[list[int], Note]:
            note = Note()
            lists = {"logits_processor": LogitsProcessorList([note]), "stopping_criteria": StoppingCriteriaList([note])}
            return duo.served.generate(prompt, max_new_tokens=NEW, **lists)[0].tolist(), note

        answers = crowd.answers(duo.engine, [lambda prompt=prompt: call(prompt) for prompt in PROMPTS])
        for prompt, (tokens, note) in zip(PROMPTS, answers, strict=True):
            assert tokens == duo.plain.generate(prompt, max_new_tokens=NEW)[0].tolist()
            n = prompt.shape[1]
            assert note.processed == [tokens[: n + i] for i in range(NEW)]
            assert note.judged == [tokens[: n + i + 1] for i in range(NEW)]
            assert note.threads == {"hf_cb-engine"}
        assert duo.engine.stats().native_calls == {}
        assert (duo.engine.stats().preemptions > 0) == ("num_blocks" in options)


def test_a_limit_far_beyond_what_comes_takes_no_memory(duo: seam.Duo, monkeypatch: pytest.MonkeyPatch) -> None:
    end = int(duo.plain.generate(PROMPTS[0], max_new_tokens=NEW)[0, -1])
    call = {"eos_token_id": end, "pad_token_id": 0, "logits_processor": [lambda ids, scores: scores]}
    duo.same(PROMPTS[0], max_new_tokens=10**12, native="positions", **call)
    monkeypatch.setattr(rules, "_ROOM", 2)
    with torch.inference_mode():
        tokens = duo.same(PROMPTS[0], max_new_tokens=40, logits_processor=[note := Note()])[0].tolist()
    assert note.processed[-1] == tokens[:-1]


def test_a_criterion_sees_the_scores_if_they_are_kept(duo: seam.Duo) -> None:
    lengths: dict[str, list[Any]] = {"plain": [], "served": []}

    for name, model in (("plain", duo.plain), ("served", duo.served)):

        def judge(input_ids: torch.Tensor, scores: Any, name: str = name, **kwargs: Any) -> torch.Tensor:
            lengths[name].append((len(scores), scores[-1].shape))
            return torch.tensor([len(scores) == 4])

        call = {"return_dict_in_generate": True, "output_scores": True, "stopping_criteria": StoppingCriteriaList([judge])}
        assert model.generate(PROMPTS[0], max_new_tokens=NEW, **call).sequences.shape[1] == 10
    assert lengths["served"] == lengths["plain"]


class Boom(Exception):
    pass


class Fail(LogitsProcessor, StoppingCriteria):
    def __init__(self, error: Exception, after: int) -> None:
        self.error, self.left = error, after

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            self.my_own_line()
        return scores if isinstance(scores, torch.Tensor) else torch.tensor([False])

    def my_own_line(self) -> None:
        raise self.error from KeyError("the reason")


@pytest.mark.parametrize("kind", ["logits_processor", "stopping_criteria"])
@pytest.mark.parametrize("after", [0, 3])
def test_an_exception_reaches_its_caller_and_nobody_else(duo: seam.Duo, kind: str, after: int) -> None:
    error = Boom("mine")
    lists = {"logits_processor": LogitsProcessorList, "stopping_criteria": StoppingCriteriaList}
    streamer = seam.Recorder()

    def fail() -> None:
        duo.served.generate(PROMPTS[1], max_new_tokens=NEW, streamer=streamer, **{kind: lists[kind]([Fail(error, after)])})

    before = duo.engine.stats().finished.get(hf_cb.FinishReason.FAILED, 0)
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        failing = threads.submit(fail)
        others = list(threads.map(lambda prompt: duo.served.generate(prompt, max_new_tokens=NEW), PROMPTS[2:]))
        assert failing.exception() is error
    assert isinstance(error.__cause__, KeyError)
    assert "my_own_line" in "".join(traceback.format_exception(error))
    assert streamer.events[-1] == "end"
    assert len(streamer.events) == after + 2
    for prompt, other in zip(PROMPTS[2:], others, strict=True):
        assert torch.equal(other, duo.plain.generate(prompt, max_new_tokens=NEW))
    assert duo.engine.stats().finished[hf_cb.FinishReason.FAILED] == before + 1
    assert duo.engine.stats().blocks_used == 0


def test_an_exception_of_transformers_own_processors(duo: seam.Duo) -> None:
    for model in (duo.plain, duo.served):
        with pytest.raises(ValueError, match="returned an empty list for batch ID 0"):
            model.generate(PROMPTS[0], max_new_tokens=NEW, prefix_allowed_tokens_fn=lambda batch_id, ids: [])


def test_a_call_of_the_model_from_its_own_processor_is_refused(duo: seam.Duo) -> None:
    def recurse(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        duo.served.generate(input_ids, max_new_tokens=1)
        return scores

    with pytest.raises(hf_cb.UnsupportedCallError, match="engine's own thread"):
        duo.served.generate(PROMPTS[0], max_new_tokens=NEW, logits_processor=LogitsProcessorList([recurse]))


def test_a_processor_that_declares_itself_safe_is_run_for_each_row(duo: seam.Duo) -> None:
    class Odd(LogitsProcessor):
        supports_continuous_batching = True

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores.roll(1, dims=-1)

    duo.same(**seam.left_padded(seam.prompts(4, 9, 1)), max_new_tokens=NEW, logits_processor=LogitsProcessorList([Odd()]))


def test_across_the_border_of_two_tokens(duo: seam.Duo) -> None:
    vocabulary = {f"<{i:03}>": i for i in range(models.VOCAB)} | {"abcdef": models.VOCAB}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<000>"))
    words.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokens = duo.same(PROMPTS[0], max_new_tokens=NEW)[0, 6:].tolist()
    call = {"tokenizer": tokenizer, "max_new_tokens": NEW, "pad_token_id": 0}
    text = tokenizer.decode(tokens)
    assert text[16:24] == f"{tokens[3]:03}><{tokens[4]:03}"
    assert duo.same(PROMPTS[0], stop_strings=text[16:24], **call).shape[1] == 6 + 5


def test_stop_strings(duo: seam.Duo) -> None:
    tokenizer = seam.word_tokenizer()
    tokens = duo.same(PROMPTS[0], max_new_tokens=NEW)[0, 6:].tolist()
    call = {"tokenizer": tokenizer, "max_new_tokens": NEW, "pad_token_id": 0}
    assert duo.same(PROMPTS[0], stop_strings=f"w{tokens[3]}", **call).shape[1] == 7 + tokens.index(tokens[3])
    config = GenerationConfig(stop_strings=[f"w{tokens[3]}"], max_new_tokens=NEW, pad_token_id=0)
    assert duo.same(PROMPTS[0], config, tokenizer=tokenizer).shape[1] < 6 + NEW
    assert config.stop_strings == [f"w{tokens[3]}"]
    duo.same(PROMPTS[0], config, tokenizer=tokenizer, stop_strings=None)
    for model in (duo.plain, duo.served):
        with pytest.raises(ValueError, match="could not locate a tokenizer"):
            model.generate(PROMPTS[0], stop_strings="w5", max_new_tokens=NEW)


def test_stop_strings_of_the_models_generation_config() -> None:
    with seam.duo() as duo:
        tokens = duo.same(PROMPTS[0], max_new_tokens=NEW)[0, 6:].tolist()
        for model in (duo.plain, duo.served):
            model.generation_config.stop_strings = [f"w{tokens[3]}"]
        call = {"tokenizer": seam.word_tokenizer(), "max_new_tokens": NEW}
        assert duo.same(PROMPTS[0], **call).shape[1] < 6 + NEW
        assert duo.same(PROMPTS[0], GenerationConfig(pad_token_id=0), **call).shape[1] < 6 + NEW


def test_max_time(duo: seam.Duo) -> None:
    """However long ago the time ran out, there is one token: plain generate looks at the clock after it."""
    assert duo.same(PROMPTS[0], max_new_tokens=NEW, max_time=1e-9).shape[1] == 7


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("option", ["logits_processor", "stopping_criteria"])
def test_one_that_would_end_the_program_ends_its_call(duo: seam.Duo, option: str, kind: type[BaseException]) -> None:
    def leave(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> Any:
        raise kind("bye")

    other = duo.engine.submit(PROMPTS[1], max_new_tokens=40)
    with pytest.raises(kind, match="bye"):
        duo.served.generate(PROMPTS[0], max_new_tokens=NEW, **{option: [leave]})
    assert len(other.result().tokens) == 40
    duo.same(PROMPTS[0], max_new_tokens=NEW)


def test_waiting_for_another_request_on_the_engines_thread_is_refused(duo: seam.Duo) -> None:
    other = duo.engine.submit(PROMPTS[1], max_new_tokens=400)
    for wait in (other.result, lambda: list(other), lambda: duo.served.generate(PROMPTS[0]), lambda: duo.engine.submit([3])):

        def ask(ids: torch.Tensor, scores: torch.Tensor, wait: Any = wait) -> torch.Tensor:
            wait()
            return scores

        with pytest.raises(hf_cb.UnsupportedCallError, match="engine's own thread"):
            duo.served.generate(PROMPTS[0], max_new_tokens=NEW, logits_processor=[ask])
    assert len(other.result().tokens) == 400
