"""Subject: the model that is measured, and the token ids that its prompts are cut from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks import peers, shapes
from benchmarks.workload import text_source
from demo import packaged_model

_RANDOM_TOKENS = 30_000


@dataclass(frozen=True, slots=True)
class Subject:
    """`origin` is the folder or id that `model` was loaded from, for peers that load it themselves."""

    model: Any
    origin: str | os.PathLike[str]
    source: list[int]

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def max_tokens(self) -> int:
        """What a request may have, prompt and output; 2,048 is more than any of the workload's."""
        return min(2048, getattr(self.model.config, "max_position_embeddings", None) or 2048)


def load(model: str | None, shape: str | None, dtype: str, device: str = "cpu") -> Subject:
    """`shape`: one of `shapes.SHAPES`, with random prompts; else `model`, an id or a folder; else the packaged model."""
    if shape is not None:
        from transformers import AutoModelForCausalLM

        origin = shapes.prepare(shape)
        loaded = AutoModelForCausalLM.from_pretrained(origin, dtype=getattr(torch, dtype)).eval()
        source = np.random.default_rng(0).integers(loaded.config.vocab_size, size=_RANDOM_TOKENS).tolist()
    else:
        origin = packaged_model.prepare() if model is None else model
        loaded, tokenizer = packaged_model.load(origin, dtype=getattr(torch, dtype))
        source = text_source(tokenizer)
    peers.ignore_end_of_sequence(loaded)
    return Subject(loaded.to(device), origin, source)
