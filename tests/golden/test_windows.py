"""Layers that look back only so far give blocks back, and every token stays that of plain `generate()`."""

from __future__ import annotations

from typing import Any

import inside
import models
import pytest
import torch
import truth

import hf_cb

pytestmark = pytest.mark.timeout(20)

BLOCK = 4
LONG = ((150, 24), (9, 40), (70, 12))  # (prompt, output) tokens: many windows of the tiny models


def ask(engine: hf_cb.Engine, rows: tuple[truth.Row, ...]) -> list[hf_cb.GenerationResult]:
    handles = truth.submit(engine, rows)
    assert truth.results(handles) == truth.tokens(rows)
    inside.scheduler(engine).check()
    return [handle.result() for handle in handles]


@pytest.mark.parametrize("name", ["mistral", "starcoder2"])
def test_with_windows_alone_a_pool_serves_what_is_longer_than_itself(name: str) -> None:
    rows = truth.rows(name, LONG)
    options = {"block_size": BLOCK, "num_blocks": 12, "max_batch_tokens": 16}
    with hf_cb.continuous_batching(truth.model(name), **options) as engine:
        assert engine.stats().num_blocks * BLOCK < 174
        ask(engine, rows)
        assert engine.stats().native_calls == {}


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "gpt_oss", "cohere2", "ministral", "llama4_text", "exaone4"])
def test_mixed_layers_hold_less(name: str) -> None:
    """One long row at a time: layers that see everything hold all of it, the others what is left of their window or chunk."""
    model, rows = truth.model(name), truth.rows(name, LONG)
    options = {"block_size": BLOCK, "num_blocks": 60, "max_batch_tokens": 16, "record_steps": 1000}
    with hf_cb.continuous_batching(model, **options) as engine:
        groups = inside.scheduler(engine).memory.num_groups
        assert engine.stats().num_blocks == 60 * groups
        ask(engine, rows[:1])
        everything = groups * -(-(150 + 24 - 1) // BLOCK)
        assert max(step.blocks_used for step in engine.steps()) < 0.8 * everything
        ask(engine, rows)
        again = ask(engine, rows)
        assert sum(result.num_cached_tokens for result in again) > 150  # what was given back is found as a prefix


@pytest.mark.parametrize("name", ["mistral", "gemma2", "llama4_text"])
def test_a_second_turn_begins_within_a_window(name: str) -> None:
    """Prompts that end anywhere in a block, a window and a chunk, after one that has given most of its blocks back."""
    model, row = truth.model(name), truth.rows(name, LONG)[0]
    full = row.full[0]
    with hf_cb.continuous_batching(model, block_size=BLOCK, num_blocks=120) as engine:
        ask(engine, (row,))
        for length in range(150, 174, 5):
            result = engine.submit(full[:length], max_new_tokens=174 - length).result()
            assert list(result.tokens) == full[length:].tolist()
            assert result.num_cached_tokens in range(length - 2 * BLOCK, length)


@pytest.mark.parametrize(
    ("name", "overrides", "num_blocks"),
    [("mistral", {"sliding_window": 64}, 24), ("gemma2", {}, 9), ("llama4_text", {}, 8)],
)
def test_a_long_second_turn_in_a_pool_that_just_holds_it(name: str, overrides: dict[str, Any], num_blocks: int) -> None:
    """What the found prefix brings into a window counts towards the most that a sequence holds there."""
    model = models.tiny(name, **overrides)
    ids = torch.randint(3, models.VOCAB, (1, 140), generator=torch.Generator().manual_seed(0))
    lengths = (100, 140) if name == "mistral" else (20, num_blocks * BLOCK - 4)
    with hf_cb.continuous_batching(model, block_size=BLOCK, num_blocks=num_blocks, max_batch_tokens=8) as engine:
        for length in lengths:
            want = type(model).generate(model, ids[:, :length], max_new_tokens=2)
            assert torch.equal(model.generate(ids[:, :length], max_new_tokens=2), want)
        assert engine.stats().native_calls == {}


def test_one_prompt_of_samples_after_its_first_has_moved_on() -> None:
    """The first sample has given back blocks that the prompt's end would need: the later ones compute for themselves."""
    model, row = truth.model("mistral"), truth.rows("mistral", LONG)[1]
    call = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 40, "pad_token_id": 0}
    with hf_cb.continuous_batching(model, block_size=BLOCK, num_blocks=40, max_batch_size=1) as engine:
        served = model.generate(row.prompt, seed=5, **call)
        assert engine.stats().native_calls == {}
    for i, got in enumerate(served):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5 + i)
            assert torch.equal(got, model.generate(row.prompt, **{**call, "num_return_sequences": 1})[0])
