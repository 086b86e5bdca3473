"""Token for token: what the engine answers, in any company, is what plain `generate()` gives for the row alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import crowd
import models
import pytest
import torch
import truth
from snapshots import snapshot
from transformers import PreTrainedModel

import hf_cb

MODES: dict[str, dict[str, Any]] = {
    "together": {},
    "small_budget": {"max_batch_tokens": 16},
    "small_pool": {"block_size": 4, "num_blocks": 13},  # the longest row takes 12
}


def ask(model: PreTrainedModel, row: truth.Row) -> list[int]:
    out = model.generate(row.prompt, max_new_tokens=len(row.tokens))
    if not model.config.is_encoder_decoder:
        assert torch.equal(out[:, : row.prompt.shape[1]], row.prompt)
    return out[0, -len(row.tokens) :].tolist()


def ask_together(model: PreTrainedModel, rows: Sequence[truth.Row]) -> list[list[int]]:
    return crowd.at_random_moments([lambda row=row: ask(model, row) for row in rows], last_pause=0.03)


@contextlib.contextmanager
def served(model: PreTrainedModel, **options: Any) -> Iterator[hf_cb.Engine]:
    """The engine on `model`, which must be the same before, during (but for `generate`) and after."""
    before = snapshot(model, writes_buffers=True)
    with hf_cb.continuous_batching(model, **options) as engine:
        yield engine
        assert "generate" in vars(model)
        assert snapshot(model, writes_buffers=True) == before
    assert "generate" not in vars(model)
    assert snapshot(model, writes_buffers=True) == before


@pytest.mark.parametrize("name", models.SERVED)
def test_alone(name: str) -> None:
    model, rows = truth.model(name), truth.rows(name)
    with served(model) as engine:
        assert [ask(model, row) for row in rows] == truth.tokens(rows)
        assert engine.stats().native_calls == {}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", models.SERVED)
def test_in_company(name: str, mode: str) -> None:
    model, rows = truth.model(name), truth.rows(name) * 2
    with served(model, **MODES[mode]) as engine:
        if mode == "small_pool":  # all at once: the pool is sure to run out
            assert crowd.answers(engine, [lambda row=row: ask(model, row) for row in rows]) == truth.tokens(rows)
        else:
            assert ask_together(model, rows) == truth.tokens(rows)
        stats = engine.stats()
    assert stats.native_calls == {}
    assert stats.mean_batch_size > 1
    assert (stats.preemptions > 0) == (mode == "small_pool")


@pytest.mark.parametrize("name", models.NATIVE)
def test_native(name: str) -> None:
    model, rows = truth.model(name), truth.rows(name)
    with served(model) as engine:
        assert ask_together(model, rows) == truth.tokens(rows)
        assert ask(model, rows[0]) == rows[0].tokens
        native_calls = engine.stats().native_calls
    assert sum(native_calls.values()) == len(rows) + 1
    assert all(native_calls)  # each has a reason


@pytest.mark.parametrize("name", models.PARTLY_SERVED)
def test_partly_served(name: str) -> None:
    """Rows below the limit, across it, and beyond it, and together beyond it in one step."""
    far = models.FAR
    lengths = ((5, 12), (far - 15, 8), (far - 10, 20), (far + 10, 12), (far // 2, 12), (far // 2, 10))
    model, rows = truth.model(name), truth.rows(name, lengths)
    with served(model) as engine:
        assert ask_together(model, rows) == truth.tokens(rows)
        assert engine.stats().output_tokens > 0
