"""Models in the form of published ones with random weights, made here: what a size costs does not depend on what it learned."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from demo.packaged_model import cache_root

# The figures of Qwen/Qwen2.5-0.5B's config.json: 494 million parameters.
_QWEN = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 151_643,
    "eos_token_id": 151_643,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {"qwen2.5-0.5b": _QWEN}


def prepare(shape: str) -> Path:
    """The folder with the shape's weights, in bfloat16: made at the first call (1 GB for `qwen2.5-0.5b`)."""
    folder = cache_root() / "shapes" / shape
    if folder.exists():  # it came there by a rename, so it is whole
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"preparing {shape} with random weights in {folder} (once)", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=f".{shape}-", dir=folder.parent, ignore_cleanup_errors=True) as scratch:
        torch.manual_seed(0)
        Qwen2ForCausalLM(Qwen2Config(**SHAPES[shape])).to(torch.bfloat16).save_pretrained(Path(scratch, shape))
        Path(scratch, shape).rename(folder)
    return folder
