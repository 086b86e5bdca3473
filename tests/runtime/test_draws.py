"""Draws against torch.multinomial: the same tokens from the same seed, and its errors."""

from __future__ import annotations

import pytest
import torch

from hf_cb.runtime import draws
from hf_cb.runtime.draws import NativeDraws, TorchDraws

CPU = torch.device("cpu")
SCALES = (0.01, 1.0, 3.0, 10.0, 80.0)


def rows(vocab: int, seed: int) -> list[torch.Tensor]:
    """Flat and peaked ones, and some of which little is left."""
    generator = torch.Generator().manual_seed(seed)
    scores = [torch.randn(vocab, generator=generator) * scale for scale in SCALES for _ in range(6)]
    for i, row in enumerate(scores[::2]):
        row[torch.randperm(vocab, generator=generator)[1 + i :]] = -torch.inf
    return [row.softmax(-1) for row in scores]


def test_the_compiled_form_is_used() -> None:
    assert isinstance(draws.draws(5, CPU), NativeDraws)


@pytest.mark.parametrize("vocab", [1, 2, 40, 311, 312, 313, 1000, 49152])
@pytest.mark.parametrize("seed", [0, 7, (1 << 32) + 5, (1 << 63) - 1])
def test_the_same_tokens(vocab: int, seed: int) -> None:
    ours, theirs = NativeDraws(seed), TorchDraws(seed, CPU)
    for probs in rows(vocab, seed % 1000):
        assert ours.draw(probs) == theirs.draw(probs)


def test_all_rows_at_once() -> None:
    """Each from its own source, bad ones between them."""
    probs = torch.stack([*rows(1000, 3), torch.full((1000,), torch.nan), torch.zeros(1000), *rows(1000, 4)])
    for _ in range(3):
        ours = draws.draw_all([NativeDraws(i) for i in range(len(probs))], probs)
        theirs = draws.draw_all([TorchDraws(i, CPU) for i in range(len(probs))], probs)
        assert ours.tolist() == theirs.tolist()
        assert ours.tolist().count(-1) == 2


@pytest.mark.parametrize("vocab", [1, 40, 49152])
def test_the_race_is_what_multinomial_runs(vocab: int) -> None:
    """On any device: it is only not looked at before it is drawn from."""
    probs = torch.stack(rows(vocab, 5))
    sources = [(TorchDraws(i, CPU), TorchDraws(i, CPU)) for i in range(len(probs))]
    for _ in range(3):
        raced = draws.draw_all([source for source, _ in sources], probs).tolist()
        assert raced == [source.draw(row) for (_, source), row in zip(sources, probs, strict=True)]


def test_many_draws_of_few_tokens() -> None:
    """So that every place in the generator's 624 words is met."""
    ours, theirs = NativeDraws(3), TorchDraws(3, CPU)
    generator = torch.Generator().manual_seed(0)
    for i in range(3000):
        probs = torch.rand(1 + i % 37, generator=generator).pow(4).softmax(-1)
        assert ours.draw(probs) == theirs.draw(probs)


@pytest.mark.parametrize("bad", [[0.5, float("nan")], [0.0, 0.0], [float("inf"), 1.0]])
def test_the_same_errors(bad: list[float]) -> None:
    messages = []
    for source in (NativeDraws(1), TorchDraws(1, CPU)):
        with pytest.raises(RuntimeError) as caught:
            source.draw(torch.tensor(bad))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_torch_with_other_numbers_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeDraws, "draw", lambda self, probs: 0)
    draws._native_is_torchs.cache_clear()
    try:
        assert isinstance(draws.draws(5, CPU), TorchDraws)
    finally:
        monkeypatch.undo()
        draws._native_is_torchs.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_probabilities_of_other_dtypes_and_lengths(dtype: torch.dtype) -> None:
    generator, ours = torch.Generator().manual_seed(5), NativeDraws(5)
    for length in (112, 3000, 7, 130):  # between them one in float32: the stream of numbers is one
        for probs in rows(length, 1)[::7]:
            for row in (probs.to(dtype), probs):
                assert ours.draw(row) == int(torch.multinomial(row, 1, generator=generator))
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        ours.draw(torch.full((5,), torch.nan, dtype=dtype))
