"""Workload: the requests of one benchmark run, as data. Everything that varies comes from one seed."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

# Chat traffic is long-tailed: most prompts and answers are short, a few are ten times the mean. A log-normal law with this
# spread, clipped to the bounds below, has about the same shape.
_SIGMA = 1.0
_PROMPT = (8, 768, 128)  # tokens: least, most, mean before clipping
_OUTPUT = (8, 384, 96)
_SOURCE_CHARACTERS = 120_000  # about 30,000 tokens: enough for prompts that don't share a start


@dataclass(frozen=True, slots=True)
class Item:
    """One request: `prompt` token ids, exactly `output_length` tokens to generate, sent `arrival` seconds after the start."""

    index: int
    prompt: tuple[int, ...]
    output_length: int
    arrival: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival."""

    items: tuple[Item, ...]

    @classmethod
    def make(
        cls, source: Sequence[int], num_requests: int = 48, *, seed: int = 0, scale: float = 1.0, rate: float | None = None
    ) -> Workload:
        """Prompts cut from `source` at random places; log-normal lengths times `scale`; Poisson arrivals at `rate` per second.

        `rate` None: all arrive at once. The lengths depend on the seed alone: not on the source, nor on the rate.
        """
        lengths_rng, places_rng, arrivals_rng = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(3))
        prompts = _lengths(lengths_rng, num_requests, _PROMPT, scale)
        outputs = _lengths(lengths_rng, num_requests, _OUTPUT, scale)
        if len(source) <= prompts.max():
            raise ValueError(f"source: takes more than {prompts.max()} token ids, the longest prompt; got {len(source)}")
        starts = [int(places_rng.integers(len(source) - length)) for length in prompts]
        gaps = arrivals_rng.exponential(1 / rate, num_requests) if rate else np.zeros(num_requests)
        arrivals = np.cumsum(gaps) - gaps[:1]  # the first is sent at the start
        return cls(
            tuple(
                Item(i, tuple(int(t) for t in source[start : start + length]), int(output), float(arrival))
                for i, (start, length, output, arrival) in enumerate(zip(starts, prompts, outputs, arrivals, strict=True))
            )
        )

    @property
    def prompt_tokens(self) -> int:
        return sum(len(item.prompt) for item in self.items)

    @property
    def output_tokens(self) -> int:
        return sum(item.output_length for item in self.items)

    def subset(self, num_requests: int) -> Workload:
        """At most `num_requests` items, sent at once, with output lengths spread as in the whole: for a slow peer."""
        if num_requests >= len(self.items):
            return self
        ranked = sorted(self.items, key=lambda item: (item.output_length, item.index))
        middles = ((np.arange(num_requests) + 0.5) * len(ranked) / num_requests).astype(int)
        chosen = sorted((ranked[i] for i in middles), key=lambda item: item.index)
        return Workload(tuple(replace(item, arrival=0.0) for item in chosen))

    def warmup(self) -> Workload:
        """A short run's worth: four requests of at most eight output tokens."""
        items = self.subset(4).items
        return Workload(tuple(replace(item, output_length=min(8, item.output_length), arrival=0.0) for item in items))


def text_source(tokenizer: Any) -> list[int]:
    """Token ids of English text that every Python has: its own help pages."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    return list(tokenizer(text[:_SOURCE_CHARACTERS], add_special_tokens=False, verbose=False)["input_ids"])


def _lengths(rng: np.random.Generator, count: int, law: tuple[int, int, int], scale: float) -> np.ndarray:
    least, most, mean = law
    drawn = rng.lognormal(np.log(mean) - _SIGMA**2 / 2, _SIGMA, count)
    return np.maximum(1, np.rint(np.clip(drawn, least, most) * scale)).astype(int)
