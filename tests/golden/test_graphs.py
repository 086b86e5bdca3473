"""The whole engine with CUDA graphs, emulated strictly on the CPU: every token is plain `generate()`'s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import crowd
import emulators
import graph_emulator
import models
import pytest
import torch
from graph_emulator import Device
from transformers import PreTrainedModel

import hf_cb
from hf_cb.runtime import graphs

pytestmark = pytest.mark.timeout(60)

LENGTHS = (3, 17, 9, 26, 5)
NEW = (14, 9, 20, 6, 16)  # rows leave one after the other: the batch passes through several sizes
KERNELS = {"flash_attn_2": 256, "flash_attn_3": 4, "flash_attn_4": 4}


@pytest.fixture
def device() -> Iterator[Device]:
    with emulators.installed("flash_attn_3", (torch.float32,)), graph_emulator.emulated() as device:
        yield device


def options(**more: Any) -> dict[str, Any]:
    return {"attention_backend": "flash_attn_3", "block_size": 4, "num_blocks": 64, "pack_memory": 0, **more}


def prompts(seed: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, models.VOCAB, (1, n), generator=generator) for n in LENGTHS]


def plain(model: PreTrainedModel, **options: Any) -> list[list[int]]:
    asked = zip(prompts(), NEW, strict=True)
    return [type(model).generate(model, p, max_new_tokens=n, **options)[0].tolist() for p, n in asked]


def ask_all(engine: hf_cb.Engine, model: PreTrainedModel, **options: Any) -> list[list[int]]:
    calls = [
        lambda p=p, n=n: model.generate(p, max_new_tokens=n, **options)[0].tolist()
        for p, n in zip(prompts(), NEW, strict=True)
    ]
    return crowd.answers(engine, calls)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3_text"])
def test_same_tokens_through_each_kernel(kernel: str, name: str) -> None:
    model = models.tiny(name, head_dim=16)
    want = plain(model)
    with emulators.installed(kernel, (torch.float32,)), graph_emulator.emulated() as device:
        own = options(attention_backend=kernel, block_size=KERNELS[kernel])
        with hf_cb.continuous_batching(model, **own) as engine:
            assert ask_all(engine, model) == want
            alone = model.generate(prompts()[2], max_new_tokens=NEW[2])[0].tolist()
            assert alone == want[2]
            stats = engine.stats()
        assert stats.native_calls == {}
        assert stats.graphs > 2, stats.graph_reason
        assert device.events.count("replay") > 20


@pytest.mark.parametrize("more", [{"num_blocks": 20}, {"max_batch_tokens": 8}, {"num_blocks": 20, "swap_space": "1MiB"}])
def test_preemption_chunks_and_prefixes(device: Device, more: dict[str, Any]) -> None:
    model = models.tiny("llama", head_dim=16)
    want = plain(model)
    with hf_cb.continuous_batching(model, **options(**more)) as engine:
        for _ in range(2):  # the second time with the prefixes of the first
            assert ask_all(engine, model) == want
        stats = engine.stats()
        assert stats.graphs > 0, stats.graph_reason
        assert stats.prefix_hits > 0
        assert stats.preemptions > 0 or "max_batch_tokens" in more
