"""The engine over a KV cache in another dtype than the model's: what fits is exact, what is rounded is near, and a row's tokens
depend on nothing but the row."""

from __future__ import annotations

from typing import Any

import emulators
import models
import pytest
import torch
import truth

import hf_cb

pytestmark = pytest.mark.timeout(60)

CALLS = truth.Calls((n, 8) for n in (3, 17, 9, 26))


@pytest.mark.parametrize("kv_dtype", ["auto", "float32"])
def test_what_fits_is_exact(kv_dtype: str) -> None:
    model = models.tiny("gemma2")
    with hf_cb.continuous_batching(model, kv_dtype=kv_dtype) as engine:
        assert engine.config.kv_dtype == "float32"
        assert engine.stats().attention_backend == "native_cpu"
        CALLS.assert_right(engine, model)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_wider_than_the_model(name: str) -> None:
    """A bfloat16 model's keys and values in float32: those of a cache in bfloat16, to the bit."""
    model = models.tiny(name).bfloat16()
    answers = []
    for kv_dtype in ("auto", "float32"):
        with hf_cb.continuous_batching(model, kv_dtype=kv_dtype, attention_backend="torch_grouped") as engine:
            answers.append(CALLS.at_once(engine, model))
            assert engine.stats().native_calls == {}
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_rows_keep_to_themselves(name: str, kv_dtype: str) -> None:
    """The same tokens alone, in company, in chunks, after a prefix hit, swapped out and in, and computed again."""
    model = models.tiny(name)
    options: dict[str, Any] = {"kv_dtype": kv_dtype, "block_size": 4, "num_blocks": 64, "fallback": "error"}
    with hf_cb.continuous_batching(model, **options) as engine:
        assert engine.stats().attention_backend == "torch_grouped"
        assert "keeps no keys and values of float32 in" in engine.stats().attention_reason
        alone = CALLS.one_by_one(model.generate)
        assert CALLS.one_by_one(model.generate) == alone
        assert engine.stats().prefix_hits > 0
        assert CALLS.at_once(engine, model) == alone
    for more in ({"max_batch_tokens": 8}, {"num_blocks": 12}, {"num_blocks": 12, "swap_space": "1MiB", "prefix_cache": False}):
        with hf_cb.continuous_batching(model, **options | more) as engine:
            assert CALLS.at_once(engine, model) == alone


@pytest.mark.parametrize(
    ("kv_dtype", "most"), [("float16", 1e-3), ("bfloat16", 1e-2), ("float8_e4m3fn", 0.1), ("float8_e5m2", 0.2)]
)
def test_how_far_the_logits_move(kv_dtype: str, most: float) -> None:
    """Of the spread between a position's largest and smallest logit, in the mean over the vocabulary."""
    model = models.tiny("llama")
    options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    want = [type(model).generate(model, p, **options).logits[0][0] for p, _ in CALLS.pairs]
    with hf_cb.continuous_batching(model, kv_dtype=kv_dtype, fallback="error"):
        got = [model.generate(p, **options).logits[0][0] for p, _ in CALLS.pairs]
    off = [float((a - b).abs().mean() / (b.max() - b.min())) for a, b in zip(got, want, strict=True)]
    assert max(off) < most
    assert max(off) > 0


def test_the_memory_plan_counts_it() -> None:
    model = models.tiny("llama")
    sizes = {}
    for kv_dtype in ("float32", "bfloat16", "float8_e4m3fn"):
        with hf_cb.continuous_batching(model, kv_dtype=kv_dtype, kv_cache_memory="1MiB") as engine:
            sizes[kv_dtype] = engine.config.num_blocks
            assert engine.config.kv_cache_memory <= 1 << 20
    assert sizes["bfloat16"] // 2 == sizes["float8_e4m3fn"] // 4 == sizes["float32"]


def test_float8_in_flash_attention_3() -> None:
    """Prompts and single tokens through the kernel's own float8: the tokens of one row are those in company."""
    model = models.tiny("llama", head_dim=16)
    with (
        emulators.installed("flash_attn_3", (torch.float32,)) as library,
        hf_cb.continuous_batching(model, kv_dtype="float8_e4m3fn", attention_backend="flash_attn_3") as engine,
    ):
        alone = CALLS.one_by_one(model.generate)
        assert CALLS.at_once(engine, model) == alone
        assert engine.stats().native_calls == {}
    assert set(library.calls) == {"flash_attn_3"}
