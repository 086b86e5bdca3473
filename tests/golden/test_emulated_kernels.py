"""The whole engine through each kernel for CUDA, emulated strictly on the CPU: every token is plain `generate()`'s."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import crowd
import emulators
import models
import pytest
import torch
import truth

import hf_cb
from hf_cb.attention.native import NativeCPUBackend

pytestmark = pytest.mark.timeout(60)

NEW = 8
CALLS = truth.Calls((n, NEW) for n in (3, 17, 9, 26))
# Head sizes that the kernels take; windows, softcaps and experts among them.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "mistral": {"head_dim": 16},
    "qwen2_moe": {"hidden_size": 64},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
}
KERNELS = {"flash_attn_2": 256, "flash_attn_3": 4, "flash_attn_4": 4, "torch_varlen": 4}


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    with emulators.installed(request.param, (torch.float32,)):
        yield request.param


@pytest.mark.parametrize("name", MODELS)
def test_same_tokens(kernel: str, name: str) -> None:
    model = models.tiny(name, **MODELS[name])
    for budget in ({}, {"max_batch_tokens": 8}):
        options = {"attention_backend": kernel, "block_size": KERNELS[kernel], "num_blocks": 64, **budget}
        if kernel == "torch_varlen" and name == "gemma2":  # it knows no softcap
            with pytest.raises(hf_cb.InvalidArgumentError, match="knows no softcap"):
                hf_cb.install(model, **options)
            return
        with hf_cb.continuous_batching(model, **options) as engine:
            assert engine.stats().attention_backend == kernel
            CALLS.assert_right(engine, model)
            assert engine.stats().native_calls == {}


def test_beams_preemption_and_prefixes(kernel: str) -> None:
    model = models.tiny("mistral", head_dim=16)
    size = KERNELS[kernel]
    options = {"attention_backend": kernel, "block_size": size, "num_blocks": 16 if size < 256 else 5, "swap_space": "1MiB"}
    with hf_cb.continuous_batching(model, **options) as engine:
        CALLS.assert_right(engine, model, times=2, num_beams=3)
        assert engine.stats().native_calls == {}


def test_the_default_block_size_is_the_kernels(kernel: str) -> None:
    model = models.tiny("llama", head_dim=16)
    with hf_cb.continuous_batching(model, attention_backend=kernel) as engine:
        assert engine.config.block_size == {"flash_attn_2": 256, "flash_attn_3": 64, "flash_attn_4": 128}.get(kernel, 16)
        assert CALLS.at_once(engine, model) == CALLS.one_by_one(model.generate)


def test_blocks_that_a_kernel_refuses() -> None:
    model = models.tiny("llama", head_dim=16)
    with (
        emulators.installed("flash_attn_2", (torch.float32,)),
        pytest.raises(hf_cb.InvalidArgumentError, match="multiple of 256 tokens, and block_size is 16"),
    ):
        hf_cb.install(model, attention_backend="flash_attn_2", block_size=16)


@pytest.fixture
def no_cpu_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice as on a GPU, where those for CPUs refuse."""
    monkeypatch.setattr(NativeCPUBackend, "why_not", lambda *_: "runs on a CPU")


CHOICES: dict[str, tuple[str, torch.dtype, str, str, str]] = {  # what is installed, dtype, model -> who takes it, why no other
    "bfloat16": (
        "flash_attn_2",
        torch.bfloat16,
        "llama",
        "flash_attn_2",
        "flash_attn_3: flash_attn_interface is not installed",
    ),
    "float16": ("flash_attn_3", torch.float16, "mistral", "flash_attn_3", "native_cpu: runs on a CPU"),
    "the newest": ("flash_attn_4", torch.bfloat16, "gemma2", "flash_attn_4", "flash_attn_4 serves every layer"),
    "none installed": ("torch_varlen", torch.bfloat16, "llama", "torch_varlen", "flash_attn_2: flash-attn is not installed"),
    "float32": ("flash_attn_2", torch.float32, "llama", "torch_grouped", "takes float16 or bfloat16, not float32"),
    "sinks": ("flash_attn_2", torch.bfloat16, "gpt_oss", "torch_grouped", "flash_attn_2: knows no sinks"),
    "chunks": ("flash_attn_3", torch.bfloat16, "llama4_text", "torch_grouped", "flash_attn_3: knows no chunks"),
    "head size": ("flash_attn_4", torch.bfloat16, "gpt2", "torch_grouped", "takes head sizes that are multiples of 8"),
    "softcap": ("torch_varlen", torch.bfloat16, "gemma2", "torch_grouped", "torch_varlen: knows no softcap"),
}


@pytest.mark.usefixtures("no_cpu_backends")
@pytest.mark.parametrize(("library", "dtype", "name", "chosen", "reason"), CHOICES.values(), ids=CHOICES)
def test_the_choice(library: str, dtype: torch.dtype, name: str, chosen: str, reason: str) -> None:
    """By what is installed, dtype, head size and option; in half precision the first logits are near plain generate's."""
    model = models.tiny(name, **MODELS.get(name, {"head_dim": 16})).to(dtype)
    options: dict[str, Any] = {"max_new_tokens": NEW, "output_logits": True, "return_dict_in_generate": True}
    want = [type(model).generate(model, p, **options) for p, _ in CALLS.pairs]
    with emulators.installed(library), hf_cb.continuous_batching(model, fallback="error") as engine:
        assert engine.stats().attention_backend == chosen
        assert reason in engine.stats().attention_reason
        got = crowd.answers(engine, [lambda p=p: model.generate(p, **options) for p, _ in CALLS.pairs])
    off = []
    for mine, plain in zip(got, want, strict=True):
        assert mine.sequences.shape == plain.sequences.shape
        if dtype == torch.float32:
            assert torch.equal(mine.sequences, plain.sequences)
        first, other = mine.logits[0].float(), plain.logits[0].float()
        off.append(float((first - other).abs().mean() / (other.max() - other.min())))
    assert statistics.median(off) < 0.03  # one expert chosen otherwise moves a row honestly


@pytest.mark.parametrize("name", ["gpt_oss", "llama4_text", "gemma2", "gptj"])
def test_what_no_kernel_takes(name: str) -> None:
    """Sinks, chunks, odd head sizes: grouped products, on any device."""
    model = models.tiny(name)
    with hf_cb.continuous_batching(model, attention_backend="torch_grouped", block_size=4, num_blocks=40) as engine:
        CALLS.assert_right(engine, model)
        assert engine.stats().native_calls == {}
