"""Sequences moved to the host's memory and back change no token, whatever the layers' shapes."""

from __future__ import annotations

import pytest
import truth
from transformers import PreTrainedModel

import hf_cb

pytestmark = pytest.mark.timeout(20)

SMALL = {"block_size": 4, "num_blocks": 24, "swap_space": "1MiB"}


def serve(model: PreTrainedModel, name: str, **options: object) -> hf_cb.EngineStats:
    rows = truth.rows(name) * 2
    with hf_cb.continuous_batching(model, **{**SMALL, **options}) as engine:
        handles = [
            engine.submit(row.prompt[0], max_new_tokens=len(row.tokens), cache_salt=str(i)) for i, row in enumerate(rows)
        ]
        assert [list(handle.result().tokens) for handle in handles] == [row.tokens for row in rows]
        engine._worker.machinery.scheduler.check()
        return engine.stats()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "llama4_text"])
def test_swapped(name: str) -> None:
    stats = serve(truth.model(name), name)
    assert stats.swaps == stats.preemptions > 0


def test_a_small_space_bounds_it() -> None:
    model = truth.model("llama")
    one_block = 4 * 3 * 2 * 2 * 12 * 4  # tokens x layers x (keys, values) x heads x head size x bytes
    assert model.config.num_hidden_layers == 3
    stats = serve(model, "llama", swap_space=4 * one_block)
    assert stats.preemptions > stats.swaps
    with hf_cb.continuous_batching(model, block_size=4, num_blocks=24, swap_space=4 * one_block + 5) as engine:
        assert engine.config.num_swap_blocks == 4
    assert serve(model, "llama", swap_space=0).swaps == 0


def test_with_everything_on() -> None:
    """Prefix hits, swaps, a target for the time between tokens, a policy; twice, cold and warm."""
    model, rows = truth.model("gemma2"), truth.rows("gemma2")
    options = {"policy": "fair", "target_itl_ms": 5, "max_batch_tokens": 32, "swap_space": "1MiB", "max_queue_size": 100}
    with hf_cb.continuous_batching(model, block_size=4, num_blocks=26, **options) as engine:
        for _ in range(2):
            handles = [
                engine.submit(row.prompt[0], max_new_tokens=len(row.tokens), tenant=f"t{i % 3}", priority=i % 2)
                for i, row in enumerate(rows * 3)
            ]
            assert [list(handle.result().tokens) for handle in handles] == [row.tokens for row in rows * 3]
        stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
