"""What nothing can serve: a typed error on the caller's thread that names the argument, while the others' requests go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import models
import numpy as np
import pytest
import seam
import torch
from transformers import BatchEncoding

import hf_cb

POSITIONS = 128


@pytest.fixture(scope="module")
def duo() -> Iterator[seam.Duo]:
    with seam.duo(options={"block_size": 4, "num_blocks": 16}, max_position_embeddings=POSITIONS) as made:
        yield made


@pytest.fixture(autouse=True)
def neighbour(duo: seam.Duo) -> Iterator[None]:
    """A request that runs all the while."""
    handle = duo.engine.submit([5, 6, 7], max_new_tokens=50)
    yield
    want = duo.plain.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=50)[0, 3:]
    assert list(handle.result(timeout=20).tokens) == want.tolist()


SUBMIT_OPTIONS: list[tuple[str, Any]] = [
    *(("max_new_tokens", value) for value in (0, -1, 2.5, "5", True)),
    *(("timeout", value) for value in (0, -1, "5", float("nan"), float("inf"), 1e300, True)),
    *(("temperature", value) for value in (0, -1.0, "hot", float("nan"), float("inf"), 10**400, True)),
    *(("top_k", value) for value in (-1, 2.5, "5", True)),
    *(("top_p", value) for value in (-0.1, 1.1, "5", float("nan"), True)),
    *((name, value) for name in ("logprobs", "prompt_logprobs") for value in (-1, 2.5, "5", True)),
    *(("min_p", value) for value in (-0.1, 1.1, "5", float("nan"), True)),
    *(("repetition_penalty", value) for value in (0, -1.0, "5", float("nan"), float("inf"), True)),
    *((name, value) for name in ("frequency_penalty", "presence_penalty") for value in ("5", float("nan"), float("inf"), True)),
    *(("logit_bias", value) for value in (5, "5", {-1: 1.0}, {models.VOCAB: 1.0}, {3: "5"}, {3: float("inf")}, {"3": 1.0})),
    *(("suppress_tokens", value) for value in (-1, 2.5, "5", [3, -1], True)),
    *(("begin_suppress_tokens", value) for value in (2.5, [[3]])),
    *(("min_new_tokens", value) for value in (-1, 2.5, "5", True)),
    *(("do_sample", value) for value in (1, "yes")),
    *(("seed", value) for value in (-1, 1 << 64, 2.5, "5", True)),
    *(("eos_token_id", value) for value in (-1, 2.5, "5", [3, -1], [[3]], True)),
    *(("priority", value) for value in (1.5, "high", True)),
    *((name, value) for name in ("tenant", "cache_salt") for value in (3, b"x", True)),
    *(("patience", value) for value in (0,)),
]


@pytest.mark.parametrize(("name", "value"), SUBMIT_OPTIONS)
def test_wrong_submit_options(duo: seam.Duo, name: str, value: Any) -> None:
    options = {"max_new_tokens": 4, name: value}
    for call in (
        lambda: duo.engine.submit([3, 4], **options),
        lambda: duo.engine.generate_batch([[3, 4], [5]], **options),
    ):
        with pytest.raises(hf_cb.InvalidArgumentError, match=rf"^{name}: "):
            call()


@pytest.mark.parametrize(
    "prompt",
    [
        *([], [[]], torch.zeros(0, dtype=torch.long), torch.zeros(1, 0, dtype=torch.long)),
        *("w1 w2", b"12", 5, None, {3, 4}, [1.5], [True], [None], torch.zeros(3)),
        *([[3], [4]], [[[3]]], torch.zeros(2, 2, dtype=torch.long)),
    ],
)
def test_prompts_that_are_none(duo: seam.Duo, prompt: Any) -> None:
    with pytest.raises(hf_cb.InvalidArgumentError, match=r"^input_ids: takes "):
        duo.engine.submit(prompt, max_new_tokens=4)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (BatchEncoding({"input_ids": torch.tensor([[3, 4]])}), r"a BatchEncoding: pass its \['input_ids'\]"),
        ({"input_ids": [3, 4]}, r"a dict: pass its \['input_ids'\]"),
        ("w1 w2", r"a string: pass tokenizer\(text\)\['input_ids'\]"),
        (["w1", "w2"], r"strings: pass tokenizer\(text\)\['input_ids'\]"),
        (["w1"], r"strings: pass tokenizer\(text\)\['input_ids'\]"),
        (torch.tensor([[3, 4], [5, 6]]), "2 rows: submit_batch takes several prompts"),
        ([[3], [4, 5], [6]], "3 rows: submit_batch takes several prompts"),
        ([3.5, 4], r"\[3.5, 4\]"),
    ],
)
def test_what_to_pass_instead(duo: seam.Duo, prompt: Any, said: str) -> None:
    for submit in (duo.engine.submit, lambda prompt: duo.engine.submit_batch([[3], prompt])):
        with pytest.raises(hf_cb.InvalidArgumentError, match=rf"^input_ids: takes one prompt's token ids.*; got {said}"):
            submit(prompt)


@pytest.mark.parametrize("samples", [1, 3])
def test_submit_gives_one_sample(duo: seam.Duo, samples: int) -> None:
    with pytest.raises(hf_cb.InvalidArgumentError, match=r"^samples: .* submit_batch"):
        duo.engine.submit([3, 4], samples=samples)


@pytest.mark.parametrize("prompt", [[3, 4, 5], (3, 4, 5), [[3, 4, 5]], torch.tensor([3, 4, 5]), np.array([[3, 4, 5]])])
def test_the_forms_of_a_prompt(duo: seam.Duo, prompt: Any) -> None:
    want = duo.plain.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4)[0, 3:].tolist()
    assert list(duo.engine.submit(prompt, max_new_tokens=4).result().tokens) == want


@pytest.mark.parametrize("wrong", [-1, models.VOCAB, 1 << 40])
def test_ids_outside_the_vocabulary(duo: seam.Duo, wrong: int) -> None:
    message = rf"^input_ids: takes token ids from 0 to {models.VOCAB - 1}; got {wrong}$"
    ids = torch.tensor([[3, wrong, 4]])
    with pytest.raises(hf_cb.InvalidArgumentError, match=message):
        duo.engine.submit(ids, max_new_tokens=4)
    with pytest.raises(hf_cb.InvalidArgumentError, match=message):
        duo.served.generate(ids, max_new_tokens=4)


@pytest.mark.parametrize("shape", [(1, 0), (0, 3)])
def test_empty_tensors(duo: seam.Duo, shape: tuple[int, int]) -> None:
    with pytest.raises(hf_cb.InvalidArgumentError, match=r"^input_ids: takes at least one"):
        duo.served.generate(torch.zeros(shape, dtype=torch.long), max_new_tokens=4)


def test_too_long_for_the_model(duo: seam.Duo) -> None:
    for length, new in ((POSITIONS - 2, 3), (POSITIONS + 1, 1), (3, 10**12), (3, 1 << 70)):
        with pytest.raises(hf_cb.RequestTooLongError, match=rf"^max_new_tokens: .* {POSITIONS} positions"):
            duo.engine.submit([5] * length, max_new_tokens=new)
    with pytest.raises(hf_cb.RequestTooLongError, match=rf"^max_new_tokens: .* {POSITIONS} positions"):
        duo.served.generate(torch.full((1, POSITIONS + 1), 5), max_new_tokens=1)


def test_too_long_for_the_pool(duo: seam.Duo) -> None:
    slots = 16 * 4
    for length, new in ((slots - 4, 6), (slots + 2, 1), (3, 100)):
        with pytest.raises(hf_cb.RequestTooLongError, match=rf"at most {slots + 1} fit the KV cache"):
            duo.engine.submit([5] * length, max_new_tokens=new)
        with pytest.raises(hf_cb.RequestTooLongError, match=rf"at most {slots + 1} fit the KV cache"):
            duo.served.generate(torch.full((1, length), 5), max_new_tokens=new)
    assert len(duo.engine.submit([5] * (slots - 4), max_new_tokens=5).result().tokens) == 5


def test_a_bad_row_takes_its_whole_call_with_it(duo: seam.Duo) -> None:
    before = duo.engine.stats().prompt_tokens
    with pytest.raises(hf_cb.InvalidArgumentError, match=r"^input_ids: "):
        duo.engine.generate_batch([[3, 4], [models.VOCAB]], max_new_tokens=4)
    with pytest.raises(hf_cb.InvalidArgumentError, match=r"^input_ids: "):
        duo.served.generate(torch.tensor([[3, 4], [3, models.VOCAB]]), max_new_tokens=4)
    assert duo.engine.stats().prompt_tokens - before in (0, 3)  # 3: the neighbour's, if it came in only now


def test_an_extreme_temperature_fails_at_most_its_own_request(duo: seam.Duo) -> None:
    handle = duo.engine.submit([5, 6], do_sample=True, temperature=1e-300, max_new_tokens=4, seed=0)
    with pytest.raises(hf_cb.RequestFailedError, match=rf"request {handle.request_id} failed"):
        handle.result(timeout=20)


def test_the_error_comes_on_the_callers_thread(duo: seam.Duo) -> None:
    errors: list[tuple[threading.Thread, BaseException]] = []

    def call() -> None:
        try:
            duo.served.generate(torch.tensor([[models.VOCAB]]), max_new_tokens=4)
        except hf_cb.InvalidArgumentError as error:
            errors.append((threading.current_thread(), error))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {thread for thread, _ in errors} == set(threads)
    assert len({id(error) for _, error in errors}) == 4


def test_what_the_generation_config_asks_and_submit_has_no_form_of(duo: seam.Duo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duo.served.generation_config, "no_repeat_ngram_size", 2)
    with pytest.raises(hf_cb.UnsupportedCallError, match=r"^no_repeat_ngram_size: "):
        duo.engine.submit([1, 2, 3], max_new_tokens=2)
