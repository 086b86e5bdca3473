"""The tiny random model of the benchmarks' tests, and what holds of each picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def llama(**more: Any) -> LlamaForCausalLM:
    """Two layers of four heads, with these config values on top; the same weights every time."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "eos_token_id": None, "pad_token_id": 0, **more})).eval()


def assert_redrawn(picture: Path, redraw: Callable[[], object]) -> None:
    """It is a picture, and from its figures the same again."""
    drawn = picture.read_bytes()
    assert drawn.startswith(b"\x89PNG")
    picture.unlink()
    redraw()
    assert picture.read_bytes() == drawn
