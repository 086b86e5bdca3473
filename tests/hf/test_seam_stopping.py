"""Where a call stops: end-of-sequence ids and lengths, from wherever they are given."""

from __future__ import annotations

from typing import Any

import models
import pytest
import seam
import torch
from transformers import GenerationConfig

NEW = 24


@pytest.fixture
def prompt() -> torch.Tensor:
    return seam.prompts(7)[0][None]


@pytest.fixture
def output(duo: seam.Duo, prompt: torch.Tensor) -> list[int]:
    """What follows the prompt when nothing stops it."""
    return duo.same(prompt, max_new_tokens=NEW)[0, prompt.shape[1] :].tolist()


def first_seen(output: list[int], index: int) -> int:
    """A token of the output that comes at `index` or later, and not before."""
    return next(token for i, token in enumerate(output) if i >= index and token not in output[:i])


def test_ends(duo: seam.Duo, prompt: torch.Tensor, output: list[int]) -> None:
    """One, one that comes at once, and whichever comes first of several."""
    eos = first_seen(output, 3)
    later = first_seen(output, output.index(eos) + 1)
    for ends, place in ((eos, output.index(eos)), (output[0], 0), ([later, eos], output.index(eos))):
        assert duo.same(prompt, max_new_tokens=NEW, eos_token_id=ends)[0, 7:].tolist() == output[: place + 1]


def test_eos_in_the_prompt_does_not_stop(duo: seam.Duo, prompt: torch.Tensor, output: list[int]) -> None:
    eos = next(token for token in prompt[0].tolist() if token not in output)
    assert duo.same(prompt, max_new_tokens=NEW, eos_token_id=eos).shape[1] == prompt.shape[1] + NEW


@pytest.mark.parametrize("eos", [-1, models.VOCAB + 5])
@pytest.mark.parametrize("held_back", [{}, {"min_new_tokens": 4}])
def test_eos_outside_the_vocabulary_never_comes(
    duo: seam.Duo, prompt: torch.Tensor, eos: int, held_back: dict[str, int]
) -> None:
    duo.same(prompt, max_new_tokens=8, eos_token_id=eos, pad_token_id=0, **held_back)


@pytest.mark.parametrize("changed", [False, True])
def test_the_models_generation_config_counts(prompt: torch.Tensor, output: list[int], changed: bool) -> None:
    """That of the model's files, and what its user changes in it."""
    eos = first_seen(output, 3)
    with seam.duo(**({} if changed else {"eos_token_id": eos})) as duo:
        own: dict[str, int] = {"eos_token_id": eos} if changed else {}
        duo.both(lambda model: model.generation_config.update(max_new_tokens=NEW, **own))
        assert duo.same(prompt)[0, -1] == duo.engine.submit(prompt).result().tokens[-1] == eos
        other = first_seen(output, output.index(eos) + 1)
        assert duo.same(prompt, eos_token_id=other)[0, -1] == other
        duo.both(lambda model: model.generation_config.update(max_new_tokens=None, max_length=9))
        assert duo.same(prompt).shape[1] == 9
        assert list(duo.engine.submit(prompt).result().tokens) == output[:2]


def test_min_new_tokens_and_min_length(duo: seam.Duo, prompt: torch.Tensor, output: list[int]) -> None:
    eos, width = output[1], prompt.shape[1]
    for limits in (
        {"min_new_tokens": 6},
        {"min_length": width + 6},
        {"min_length": 2},
        {"min_new_tokens": 5, "min_length": 99},
    ):
        duo.same(prompt, max_new_tokens=NEW, eos_token_id=eos, **limits)
    assert duo.same(prompt, max_new_tokens=NEW, eos_token_id=eos, min_new_tokens=6).shape[1] > width + 6


@pytest.mark.parametrize(
    ("limits", "new"),
    [
        ({"max_new_tokens": 1}, 1),
        ({"max_new_tokens": 9}, 9),
        ({"max_length": 8}, 1),
        ({"max_length": 15}, 8),
        ({"max_new_tokens": 5, "max_length": 15}, 5),
        ({"max_new_tokens": 12, "max_length": 9}, 12),
    ],
)
def test_lengths(duo: seam.Duo, prompt: torch.Tensor, limits: dict[str, int], new: int) -> None:
    assert duo.same(prompt, **limits).shape[1] == prompt.shape[1] + new


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
def test_no_length_given(duo: seam.Duo, prompt: torch.Tensor, output: list[int]) -> None:
    assert duo.same(prompt).shape[1] == prompt.shape[1] + 20
    assert list(duo.engine.submit(prompt).result().tokens) == output[:20]


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
def test_no_length_given_near_the_models_last_position() -> None:
    prompt = seam.prompts(120)[0][None]
    with seam.duo(max_position_embeddings=128) as duo:
        assert duo.same(prompt).shape[1] == 128
        assert len(duo.engine.submit(prompt).result().tokens) == 8


def test_generation_config_object(duo: seam.Duo, prompt: torch.Tensor, output: list[int]) -> None:
    eos = first_seen(output, 3)
    config = GenerationConfig(max_new_tokens=NEW, eos_token_id=eos)
    before = config.to_dict()
    assert duo.same(prompt, config)[0, -1] == eos
    assert duo.same(prompt, generation_config=config)[0, -1] == eos
    assert duo.same(prompt, generation_config=config, max_new_tokens=2).shape[1] == prompt.shape[1] + 2
    assert config.to_dict() == before


def test_rows_of_a_batch_end_apart(duo: seam.Duo) -> None:
    batch = seam.left_padded(seam.prompts(5, 9, 2, 7))
    ends = list(range(3, models.VOCAB, 9))
    got = duo.same(**batch, max_new_tokens=NEW, eos_token_id=ends, pad_token_id=seam.PAD)[:, 9:]
    assert len({int((row == seam.PAD).sum()) for row in got}) > 1


@pytest.mark.parametrize("ends", [{}, {"eos_token_id": list(range(20, 30)), "pad_token_id": seam.PAD}], ids=["no end", "ends"])
def test_stop_strings_of_several_rows(duo: seam.Duo, ends: dict[str, Any]) -> None:
    """Without an end, rows that have stopped go on with whatever the model says, until all have."""
    batch = seam.left_padded(seam.prompts(5, 9, 2, 7))
    strings = [f"w{i}" for i in range(3, models.VOCAB, 7)]
    call = {**batch, **ends, "tokenizer": seam.word_tokenizer(), "stop_strings": strings, "max_new_tokens": 3 * NEW}
    assert duo.same(**call).shape[1] < 9 + 3 * NEW
    duo.same(**batch, **ends, max_new_tokens=NEW, max_time=1000.0)


def test_a_row_that_fails_ends_those_that_would_go_on_for_it(duo: seam.Duo) -> None:
    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        if row == 1 and len(ids) > 12:
            raise KeyError("row 1")
        return [20] if row == 0 else list(range(3, 19))

    batch, kept = seam.left_padded(seam.prompts(5, 9)), {"return_dict_in_generate": True, "output_scores": True}
    before = duo.engine.stats().output_tokens
    call = {"eos_token_id": 20, "pad_token_id": seam.PAD, "max_new_tokens": 400, "prefix_allowed_tokens_fn": allowed}
    with pytest.raises(KeyError, match="row 1"):
        duo.served.generate(**batch, **kept, **call)
    assert duo.engine.stats().output_tokens - before < 40


def test_without_a_pad_id_rows_are_padded_with_the_first_end() -> None:
    with seam.duo(pad_token_id=None) as duo:
        batch, ends = seam.left_padded(seam.prompts(5, 9, 2, 7)), list(range(3, models.VOCAB, 9))
        got = duo.same(**batch, max_new_tokens=NEW, eos_token_id=ends)[:, 9:]
        assert max(int((row == ends[0]).sum()) for row in got) > 1
