"""A plain text-generation pipeline and an installed one, over two models with the same weights."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import models
from seam import seeded, word_tokenizer
from transformers import TextGenerationPipeline

import hf_cb

TEMPLATE = (
    "{% for message in messages %}{{ 'w5 ' if message['role'] == 'user' else 'w7 ' }}{{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}w9{% endif %}"
)


def pipe_of(name: str = "llama", **overrides: Any) -> TextGenerationPipeline:
    """A pipeline over the tiny model of this name, with a tokenizer of its own."""
    tokenizer = word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return TextGenerationPipeline(model=models.tiny(name, **overrides), tokenizer=tokenizer, device="cpu")


def texts(*lengths: int) -> list[str]:
    """One prompt per length, in words of the tiny vocabulary; always the same."""
    rng = random.Random(len(lengths))
    return [" ".join(f"w{rng.randrange(3, models.VOCAB)}" for _ in range(length)) for length in lengths]


@dataclass(frozen=True)
class Pipes:
    """`plain` is untouched, `served` is installed."""

    plain: TextGenerationPipeline
    served: TextGenerationPipeline
    engine: hf_cb.Engine

    def same(self, inputs: Any, native: bool = False, **options: Any) -> Any:
        """What both answer, after comparing. The engine must have served it; with `native` not."""
        options = {"do_sample": False, "max_new_tokens": 7, **options}
        want = self.plain(inputs, **options)
        before = sum(self.engine.stats().native_calls.values())
        got = self.served(inputs, **options)
        assert (sum(self.engine.stats().native_calls.values()) > before) == native
        assert got == want
        return want

    def sampled(self, text: str, seed: int, **options: Any) -> Any:
        """What the plain pipeline gives after torch.manual_seed."""
        with seeded(seed):
            return self.plain(text, do_sample=True, max_new_tokens=7, **options)


@contextlib.contextmanager
def pipes(name: str = "llama", options: dict[str, Any] | None = None, **overrides: Any) -> Iterator[Pipes]:
    """Both; `options` are the engine's, `overrides` the model's."""
    plain, served = pipe_of(name, **overrides), pipe_of(name, **overrides)
    with hf_cb.continuous_batching(served, **(options or {})) as engine:
        yield Pipes(plain, served, engine)
