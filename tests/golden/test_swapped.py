"""Sequences moved to the host's memory and back change no token, whatever the layers' shapes."""

from __future__ import annotations

import random
import time

import crowd
import inside
import pytest
import truth
from transformers import PreTrainedModel

import hf_cb
from hf_cb.core.swap_cost import SwapCost

pytestmark = pytest.mark.timeout(20)

SMALL = {"block_size": 4, "num_blocks": 14, "swap_space": "1MiB"}


def serve(model: PreTrainedModel, name: str, **options: object) -> hf_cb.EngineStats:
    rows = truth.rows(name) * 2
    with hf_cb.continuous_batching(model, **{**SMALL, **options}) as engine:
        with crowd.held(engine, len(rows)):
            handles = [handle for i, row in enumerate(rows) for handle in truth.submit(engine, [row], cache_salt=str(i))]
        assert truth.results(handles) == truth.tokens(rows)
        inside.scheduler(engine).check()
        return engine.stats()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "llama4_text"])
def test_swapped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapCost, "is_cheaper", lambda *_: True)  # whatever was measured
    # Where all layers have a window, a sequence soon holds so little that a pool for one prompt never runs out.
    stats = serve(truth.model(name), name, num_blocks=24 if name == "mistral" else 14)
    assert stats.swaps == stats.preemptions > 0


def test_a_small_space_bounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapCost, "is_cheaper", lambda *_: True)
    model = truth.model("llama")
    one_block = 4 * 3 * 2 * 2 * 12 * 4  # tokens x layers x (keys, values) x heads x head size x bytes
    assert model.config.num_hidden_layers == 3
    stats = serve(model, "llama", swap_space=4 * one_block)
    assert stats.preemptions > stats.swaps
    with hf_cb.continuous_batching(model, block_size=4, num_blocks=24, swap_space=4 * one_block + 5) as engine:
        assert engine.config.num_swap_blocks == 4
    assert serve(model, "llama", swap_space=0).swaps == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_200_random_requests_with_everything_on(name: str) -> None:
    """Prefix hits, swaps, recomputation, a target for the time between tokens, fair tenants, cancelled neighbours."""
    chance, model, rows = random.Random(7), truth.model(name), truth.rows(name)
    options = {"policy": "fair", "target_itl_ms": 5, "max_batch_tokens": 32, "swap_space": "64KiB", "max_queue_size": 300}
    with hf_cb.continuous_batching(model, block_size=4, num_blocks=16, **options) as engine:
        asked = []
        for i in range(200):
            row = chance.choice(rows)
            start = chance.randint(0, len(row.tokens) // 2)  # from the middle of its output, as a second turn would
            prompt, want = row.full[0, : row.prompt.shape[1] + start], row.tokens[start:]
            salt = chance.choice((None, None, "a"))
            handle = engine.submit(prompt, max_new_tokens=len(want), tenant=f"t{i % 3}", priority=i % 2, cache_salt=salt)
            asked.append((handle, want))
            if chance.random() < 0.1:
                handle.cancel()
            if chance.random() < 0.1:
                time.sleep(chance.random() * 0.01)
        survived = 0
        for handle, want in asked:
            try:
                assert list(handle.result().tokens) == want
                survived += 1
            except hf_cb.RequestCancelledError:
                assert list(handle.tokens) == want[: len(handle.tokens)]
        stats = engine.stats()
        inside.scheduler(engine).check()
    assert survived >= 150
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
