"""Rotary embeddings whose frequencies follow the longest position in the batch, and so belong to nobody alone."""

from __future__ import annotations

from collections.abc import Iterator

import models
import pytest
import seam
import torch
from torch import nn

import hf_cb
from hf_cb.hf.twins.twin import make_twin

NEAR = 128  # original positions of the dynamic model; models.FAR of the other
NAMES = {"llama+dynamic_rope": NEAR, "phi3+longrope": models.FAR}


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[seam.Duo, int]]:
    name, limit = request.param, NAMES[request.param]
    overrides = {"max_position_embeddings": NEAR} if name == "llama+dynamic_rope" else {}
    with seam.duo(name, **overrides) as duo:
        yield duo, limit


@pytest.fixture(autouse=True)
def short_frequencies(case: tuple[seam.Duo, int]) -> None:
    """A plain call leaves the frequencies as it needed them, and the next one may go on with them: start all tests alike."""
    for model in (case[0].plain, case[0].served):
        with torch.no_grad():
            model(prompt(5))


def prompt(length: int) -> torch.Tensor:
    return seam.prompts(length)[0][None]


def test_calls_within_the_original_positions_are_served(case: tuple[seam.Duo, int]) -> None:
    duo, limit = case
    for length, new in ((3, 20), (limit - 10, 10), (limit - 1, 1)):
        duo.same(prompt(length), max_new_tokens=new)


def test_calls_beyond_them_run_natively(case: tuple[seam.Duo, int], caplog: pytest.LogCaptureFixture) -> None:
    duo, limit = case
    with caplog.at_level("INFO", logger="hf_cb"):
        for length, new in ((limit - 10, 30), (limit, 1), (limit + 1, 4), (2 * limit, 8)):
            duo.same(prompt(length), max_new_tokens=new, native=f"{limit} positions")
        duo.same(prompt(5), max_new_tokens=4)
    assert "rebuilding" not in caplog.text  # the frequencies that changed are not the twin's


def test_submit_refuses_them(case: tuple[seam.Duo, int]) -> None:
    duo, limit = case
    for length, new in ((limit - 10, 30), (limit + 1, 4)):
        with pytest.raises(hf_cb.RequestTooLongError, match=f"{limit} positions"):
            duo.engine.submit(prompt(length), max_new_tokens=new)


def test_a_long_plain_call_does_not_disturb_those_being_served(case: tuple[seam.Duo, int]) -> None:
    duo, limit = case
    short, new = prompt(20), 60
    want = duo.same(short, max_new_tokens=new)[0, 20:].tolist()
    stream = iter(duo.engine.submit(short, max_new_tokens=new))
    got = [next(stream) for _ in range(5)]
    for _ in range(2):  # plain generate changes the frequencies of the user's model
        duo.same(prompt(limit + 20), max_new_tokens=5, native="positions")
    assert got + list(stream) == want
    assert list(duo.engine.submit(short, max_new_tokens=new).result().tokens) == want


def test_the_twin_has_frequencies_of_its_own(case: tuple[seam.Duo, int]) -> None:
    duo, limit = case
    twin, rope = make_twin(duo.plain), duo.plain.model.rotary_emb
    assert twin.model.rotary_emb.inv_freq.data_ptr() != rope.inv_freq.data_ptr()
    before = twin.model.rotary_emb.inv_freq.clone()
    with torch.no_grad():
        duo.plain(prompt(limit + 20))
    assert not torch.equal(rope.inv_freq, before)
    assert torch.equal(twin.model.rotary_emb.inv_freq, before)


def test_a_twin_made_after_a_long_call_serves_short_ones(case: tuple[seam.Duo, int], caplog: pytest.LogCaptureFixture) -> None:
    duo, limit = case
    with torch.no_grad():
        duo.served(prompt(limit + 20))
    duo.served.lm_head.weight = nn.Parameter(duo.served.lm_head.weight.detach())  # makes a new twin
    with caplog.at_level("INFO", logger="hf_cb"):
        duo.same(prompt(20), max_new_tokens=20)
    assert "rebuilding" in caplog.text
