"""The whole engine through each kernel for CUDA, emulated strictly on the CPU: every token is plain `generate()`'s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import crowd
import emulators
import models
import pytest
import torch
from transformers import PreTrainedModel

import hf_cb

pytestmark = pytest.mark.timeout(60)

NEW = 8
LENGTHS = (3, 17, 9, 26)
# Head sizes that the kernels take; windows, softcaps and experts among them.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "mistral": {"head_dim": 16},
    "qwen2_moe": {"hidden_size": 64},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
}
KERNELS = {"flash_attn_2": 256, "flash_attn_3": 4, "flash_attn_4": 4, "torch_varlen": 4}


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, models.VOCAB, (1, n), generator=generator) for n in LENGTHS]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    with emulators.installed(request.param, (torch.float32,)):
        yield request.param


def ask_all(engine: hf_cb.Engine, model: PreTrainedModel, **options: Any) -> list[list[int]]:
    calls = [lambda p=p: model.generate(p, max_new_tokens=NEW, **options)[0].tolist() for p in prompts()]
    return crowd.answers(engine, calls)


@pytest.mark.parametrize("name", MODELS)
def test_same_tokens(kernel: str, name: str) -> None:
    model = models.tiny(name, **MODELS[name])
    want = [type(model).generate(model, p, max_new_tokens=NEW)[0].tolist() for p in prompts()]
    for budget in ({}, {"max_batch_tokens": 8}):
        options = {"attention_backend": kernel, "block_size": KERNELS[kernel], "num_blocks": 64, **budget}
        if kernel == "torch_varlen" and name == "gemma2":  # it knows no softcap
            with pytest.raises(hf_cb.InvalidArgumentError, match="knows no softcap"):
                hf_cb.install(model, **options)
            return
        with hf_cb.continuous_batching(model, **options) as engine:
            assert engine.stats().attention_backend == kernel
            assert ask_all(engine, model) == want
            assert engine.stats().native_calls == {}


def test_beams_preemption_and_prefixes(kernel: str) -> None:
    model = models.tiny("mistral", head_dim=16)
    want = [type(model).generate(model, p, max_new_tokens=NEW, num_beams=3)[0].tolist() for p in prompts()]
    size = KERNELS[kernel]
    options = {"attention_backend": kernel, "block_size": size, "num_blocks": 16 if size < 256 else 5, "swap_space": "1MiB"}
    with hf_cb.continuous_batching(model, **options) as engine:
        for _ in range(2):
            assert ask_all(engine, model, num_beams=3) == want
        assert engine.stats().native_calls == {}


def test_the_default_block_size_is_the_kernels(kernel: str) -> None:
    model = models.tiny("llama", head_dim=16)
    with hf_cb.continuous_batching(model, attention_backend=kernel) as engine:
        assert engine.config.block_size == {"flash_attn_2": 256, "flash_attn_3": 64, "flash_attn_4": 128}.get(kernel, 16)
        assert ask_all(engine, model) == [model.generate(p, max_new_tokens=NEW)[0].tolist() for p in prompts()]


def test_blocks_that_a_kernel_refuses() -> None:
    model = models.tiny("llama", head_dim=16)
    with (
        emulators.installed("flash_attn_2", (torch.float32,)),
        pytest.raises(hf_cb.InvalidArgumentError, match="multiple of 256 tokens, and block_size is 16"),
    ):
        hf_cb.install(model, attention_backend="flash_attn_2", block_size=16)


@pytest.mark.parametrize("name", ["gpt_oss", "llama4_text", "gemma2", "gptj"])
def test_what_no_kernel_takes(name: str) -> None:
    """Sinks, chunks, odd head sizes: grouped products, on any device."""
    model = models.tiny(name)
    want = [type(model).generate(model, p, max_new_tokens=NEW)[0].tolist() for p in prompts()]
    with hf_cb.continuous_batching(model, attention_backend="torch_grouped", block_size=4, num_blocks=40) as engine:
        assert ask_all(engine, model) == want
        assert engine.stats().native_calls == {}
