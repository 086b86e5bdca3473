"""Models with quantised layers: the tokens of the same quantised model alone, or a reason why not.

Run by test_quantised.py, in a process that finds the libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import crowd
import models
import pytest
import torch
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

import hf_cb

pytestmark = pytest.mark.timeout(60)

NEW = 8
Make = Callable[[Path], PreTrainedModel]


def whole() -> PreTrainedModel:
    return models.tiny("llama", hidden_size=64, intermediate_size=128, head_dim=16)


def loaded(config: Any) -> Make:
    """By transformers, which quantises all linear layers but the head."""

    def make(folder: Path) -> PreTrainedModel:
        whole().save_pretrained(folder)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
        model.generation_config.eos_token_id = None
        return model

    return make


def by_hand(folder: Path) -> PreTrainedModel:
    """By torchao, which quantises the head as well."""
    model = whole()
    quantize_(model, Int8WeightOnlyConfig())
    return model


NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
SERVED: dict[str, Make] = {
    "torchao int8": loaded(TorchAoConfig(Int8WeightOnlyConfig())),
    "torchao int8 by hand": by_hand,
    "torchao float8": loaded(TorchAoConfig(Float8WeightOnlyConfig())),
    "bitsandbytes nf4": loaded(NF4),
}
NATIVE: dict[str, tuple[Make, str]] = {
    # Activations are rounded to 8 bits on the way: a step that falls on the other side of a half changes what comes after.
    "torchao int8 x int8": (loaded(TorchAoConfig(Int8DynamicActivationInt8WeightConfig())), "other logits than the same rows"),
    # Columns in which any row is large are computed apart: what a row gets depends on the others.
    "bitsandbytes int8": (loaded(BitsAndBytesConfig(load_in_8bit=True)), "packed rows"),
}


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, models.VOCAB, (1, n), generator=generator) for n in (3, 17, 9, 26)]


def plain(model: PreTrainedModel, **options: Any) -> list[list[int]]:
    return [type(model).generate(model, p, max_new_tokens=NEW, **options)[0].tolist() for p in prompts()]


@pytest.mark.parametrize("name", SERVED)
def test_same_tokens(name: str, tmp_path: Path) -> None:
    """Alone and in company, in one piece and in chunks. Only a head that is as it was is packed."""
    model = SERVED[name](tmp_path)
    want, beams = plain(model), plain(model, num_beams=2)
    assert want != plain(whole())
    for options in ({}, {"max_batch_tokens": 8}):
        with hf_cb.continuous_batching(model, fallback="error", **options) as engine:
            assert engine.unsupported_reason is None
            head = 0 if name.endswith("by hand") else model.lm_head.weight.nbytes
            assert engine.stats().packed_bytes == head
            asked = [lambda p=p: model.generate(p, max_new_tokens=NEW)[0].tolist() for p in prompts()]
            assert [call() for call in asked] == want
            assert crowd.answers(engine, asked) == want
            if options:
                asked = [lambda p=p: model.generate(p, max_new_tokens=NEW, num_beams=2)[0].tolist() for p in prompts()]
                assert crowd.answers(engine, asked) == beams
    assert plain(model) == want


@pytest.mark.parametrize("name", NATIVE)
def test_what_depends_on_more_than_the_row(name: str, tmp_path: Path) -> None:
    make, reason = NATIVE[name]
    model = make(tmp_path)
    want = plain(model)
    engine = hf_cb.install(model)
    assert engine is not None
    assert reason in str(engine.unsupported_reason)
    assert [model.generate(p, max_new_tokens=NEW)[0].tolist() for p in prompts()] == want
    assert list(engine.stats().native_calls.values()) == [len(want)]
    hf_cb.uninstall(model)


def test_a_quantised_weight_that_is_written_to(tmp_path: Path) -> None:
    """Its numbers are in tensors of its own, which are watched like others: what was computed before is no prefix any more."""
    model = by_hand(tmp_path)
    prompt = prompts()[1]

    def ask() -> list[int]:
        tokens: list[int] = model.generate(prompt, max_new_tokens=NEW)[0].tolist()
        return tokens

    with hf_cb.continuous_batching(model, block_size=4, fallback="error") as engine:
        before = ask()
        assert ask() == before
        assert engine.stats().cached_tokens == 16
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.v_proj.weight.scale.mul_(-1)
        want = plain(model)[1]
        assert ask() == want != before
        assert engine.stats().cached_tokens == 16
