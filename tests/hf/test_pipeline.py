"""An installed pipeline answers what the plain one answers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from crowd import held
from seam import seeded
from torch.utils.data import Dataset
from transformers import GenerationConfig, LogitsProcessorList, MinLengthLogitsProcessor, StoppingCriteria
from transformers.pipelines.pt_utils import KeyDataset
from two_pipes import Pipes, pipe_of, pipes, texts

import hf_cb

pytestmark = pytest.mark.timeout(20)

TEXTS = texts(3, 17, 1, 9, 30, 5, 12, 2, 8)
CHATS = [[{"role": "user", "content": text}] for text in TEXTS[:4]]
PREFILLED = [[*CHATS[0], {"role": "assistant", "content": "w11 w12"}]]


@pytest.fixture(scope="module")
def both() -> Iterator[Pipes]:
    with pipes(options={"record_steps": 10_000}) as made:
        yield made


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_full_text": False},
        {"return_tensors": True},
        {"prefix": "w10 w20 "},
        {"stop_sequence": "w50"},
        {"max_length": 40, "max_new_tokens": None},
        {"generation_config": GenerationConfig(max_new_tokens=5, do_sample=False), "max_new_tokens": None, "do_sample": None},
        {"truncation": True, "tokenizer_encode_kwargs": {"max_length": 4}},
        {"repetition_penalty": 3.0, "no_repeat_ngram_size": 2},
        {"handle_long_generation": "hole"},
        {"skip_special_tokens": False, "clean_up_tokenization_spaces": True},
        {"return_dict_in_generate": True},
    ],
    ids=str,
)
def test_lists(both: Pipes, options: dict[str, Any], batch_size: int) -> None:
    options = {"do_sample": False, "max_new_tokens": 7, **options}
    options = {name: value for name, value in options.items() if value is not None}
    want = both.plain(TEXTS, batch_size=batch_size, **options)
    got = both.served(TEXTS, batch_size=batch_size, **options)
    assert got == want
    assert len(want) == len(TEXTS)


@pytest.mark.parametrize(
    "inputs", [TEXTS[0], TEXTS, CHATS[0], CHATS, PREFILLED[0], [*CHATS, *PREFILLED], [TEXTS[1]], ["", *TEXTS[:3]]], ids=len
)
def test_kinds_of_input(both: Pipes, inputs: Any) -> None:
    both.same(inputs)
    both.same(inputs, return_full_text=False)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma2"])
def test_models_that_end_their_texts_apart(name: str) -> None:
    with pipes(name, **({"eos_token_id": 7} if name == "llama" else {})) as made:
        made.same(TEXTS, max_new_tokens=30, batch_size=4)
        made.same(TEXTS, max_new_tokens=30, batch_size=3, return_tensors=True)


def test_samples_and_several_of_each_item(both: Pipes) -> None:
    assert both.served(TEXTS, do_sample=True, max_new_tokens=7, seed=11) == [both.sampled(text, 11) for text in TEXTS]
    got = both.served(TEXTS, do_sample=True, num_return_sequences=3, max_new_tokens=7, seed=11)
    assert got == [[both.sampled(text, 11 + i)[0] for i in range(3)] for text in TEXTS]


@pytest.mark.parametrize("native", [False, True])
def test_unseeded_samples_repeat_with_torchs_seed_and_differ_between_items(both: Pipes, native: bool) -> None:
    def run() -> Any:
        with seeded(3):
            options = {"max_new_tokens": 7, **({"guidance_scale": 1.5} if native else {})}
            return both.served([TEXTS[0]] * 12, do_sample=True, **options), torch.rand(())

    (first, drawn), (second, drawn_again) = run(), run()
    assert first == second
    assert drawn == drawn_again
    assert len({item[0]["generated_text"] for item in first}) > 6


class Listed(Dataset):
    def __getitem__(self, i: int) -> str:
        return TEXTS[i]

    def __len__(self) -> int:
        return len(TEXTS)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("kind", ["generator", "dataset", "keys"])
def test_what_is_iterated(both: Pipes, kind: str, batch_size: int) -> None:
    def make() -> Any:
        if kind == "generator":
            return (text for text in TEXTS)
        return Listed() if kind == "dataset" else KeyDataset([{"text": text} for text in TEXTS], "text")

    options = {"do_sample": False, "max_new_tokens": 7, "batch_size": batch_size}
    want, got = both.plain(make(), **options), both.served(make(), **options)
    if kind != "generator":
        assert len(got) == len(TEXTS)
        assert list(got) == list(want) == list(got)  # a second time too
    else:
        assert list(got) == list(want)


def test_a_generator_of_chats(both: Pipes) -> None:
    options = {"do_sample": False, "max_new_tokens": 7}
    assert list(both.served((chat for chat in CHATS), **options)) == list(both.plain((chat for chat in CHATS), **options))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_items_of_a_call_share_batches(both: Pipes, batch_size: int) -> None:
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 7, "batch_size": batch_size}
    before = len(both.engine.steps())
    with ThreadPoolExecutor(1) as caller:
        with held(both.engine, len(TEXTS)):
            results = caller.submit(both.served, TEXTS, **options)
        assert results.result() == both.plain(TEXTS, **options)
    assert max(len(step.sampled) for step in both.engine.steps()[before:]) == len(TEXTS)


def test_what_the_engine_cannot_serve(both: Pipes) -> None:
    both.same(TEXTS, num_beams=2)
    both.same(TEXTS, native=True, guidance_scale=1.5)
    both.served.model.train()
    try:
        both.same(TEXTS[:2], native=True)
    finally:
        both.served.model.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        both.same(TEXTS[:2], native=True)
    both.same(TEXTS)


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_a_model_that_the_engine_cannot_serve(name: str) -> None:
    with pipes(name) as made:
        assert made.engine.unsupported_reason
        made.same(TEXTS, native=True)
        with seeded(4):  # as plain to the letter: one item after the other
            want = made.plain(TEXTS[:3], do_sample=True, max_new_tokens=5)
            torch.manual_seed(4)
            assert made.served(TEXTS[:3], do_sample=True, max_new_tokens=5) == want


class Third(StoppingCriteria):
    """Counts its calls over all items: the third of them ends a text."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return torch.full((len(input_ids),), self.calls % 3 == 0)


def test_what_all_items_share_is_called_for_one_item_after_the_other(both: Pipes) -> None:
    options = {"do_sample": False, "max_new_tokens": 8}
    want = both.plain(TEXTS, stopping_criteria=[Third()], **options)
    assert both.served(TEXTS, stopping_criteria=[Third()], **options) == want
    processors = LogitsProcessorList([MinLengthLogitsProcessor(20, 3, device="cpu")])
    assert both.served(TEXTS, logits_processor=processors, **options) == both.plain(
        TEXTS, logits_processor=processors, **options
    )


def test_inside_of_a_pause(both: Pipes) -> None:
    with both.engine.pause():
        both.same(TEXTS[:3], native=True)


def test_a_small_queue() -> None:
    with pipes(options={"max_queue_size": 2, "max_batch_size": 2}) as made:
        made.same(TEXTS)


def test_the_serialized_backend(both: Pipes) -> None:
    pipe = pipe_of()
    hf_cb.install(pipe, backend="serialized")
    assert pipe(TEXTS, do_sample=False, max_new_tokens=7) == both.same(TEXTS)
    hf_cb.uninstall(pipe)
