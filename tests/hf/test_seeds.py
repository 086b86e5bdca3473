"""torch's global generator, shared by seeded native calls and by those who draw a seed from it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from hf_cb.hf.calls.seeds import draw_seed, seeded


@pytest.fixture(autouse=True)
def own_generator() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


def elsewhere(call: Callable[[], int]) -> int:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def test_who_draws_meanwhile_neither_disturbs_nor_follows_a_seeded_call() -> None:
    torch.manual_seed(5)
    inside = [torch.rand(3), torch.rand(3)]
    torch.manual_seed(1)
    outside = [draw_seed(), draw_seed(), draw_seed()]

    torch.manual_seed(1)
    assert draw_seed() == outside[0]
    with seeded(5):
        assert torch.equal(torch.rand(3), inside[0])
        assert elsewhere(draw_seed) == outside[1]
        assert torch.equal(torch.rand(3), inside[1])
    assert draw_seed() == outside[2]


def test_one_inside_of_another() -> None:
    torch.manual_seed(5)
    inside = [torch.rand(3), torch.rand(3)]
    torch.manual_seed(1)
    outside = [draw_seed(), draw_seed()]

    torch.manual_seed(1)
    with seeded(5):
        assert torch.equal(torch.rand(3), inside[0])
        with seeded(5):
            assert torch.equal(torch.rand(3), inside[0])
            assert elsewhere(draw_seed) == outside[0]
        assert torch.equal(torch.rand(3), inside[1])
    assert draw_seed() == outside[1]


def test_two_seeded_calls_wait_for_one_another() -> None:
    torch.manual_seed(5)
    want = torch.rand(4)
    entered, seen = threading.Event(), []

    def other() -> None:
        entered.set()
        with seeded(5):
            seen.append(torch.rand(4))

    thread = threading.Thread(target=other)
    with seeded(5):
        thread.start()
        entered.wait()
        assert torch.equal(torch.rand(4), want)
        assert not seen
    thread.join()
    assert torch.equal(seen[0], want)
