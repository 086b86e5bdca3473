"""One request alone: what the engine costs or saves where there is nothing to batch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import machine, peers

PROMPT_TOKENS = 128
NEW_TOKENS = 64


def measure(model: Any, source: Sequence[int], repeats: int, scale: float = 1.0, **options: Any) -> dict[str, Any]:
    """Plain `generate` and the engine in turns on one prompt; median output tokens per second, the prompt's time included."""
    ids = torch.tensor([source[: max(1, round(PROMPT_TOKENS * scale))]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    new_tokens = max(2, round(NEW_TOKENS * scale))
    rates: dict[str, list[float]] = {"plain": [], "hf_cb": []}
    outputs: dict[str, torch.Tensor] = {}
    # Without the prefix cache: the prompt is the same in every round, and plain generate computes it every time.
    with peers.installed(model, **{"prefix_cache": False, **options}), machine.usage() as usage:
        # install() gives this instance a `generate` of its own; the class keeps the plain one.
        ways = {"plain": lambda **kwargs: type(model).generate(model, **kwargs), "hf_cb": model.generate}
        for round_ in tqdm(range(-1, repeats), desc="one request alone", unit="round", leave=False):
            for name, generate in ways.items():
                start = time.perf_counter()
                outputs[name] = generate(**inputs, max_new_tokens=new_tokens)
                if round_ >= 0:  # the first is the warm-up
                    rates[name].append(new_tokens / (time.perf_counter() - start))
    plain, ours = (statistics.median(rates[name]) for name in ("plain", "hf_cb"))
    return {
        "prompt_tokens": ids.shape[1],
        "new_tokens": new_tokens,
        "plain_tokens_per_second": plain,
        "hf_cb_tokens_per_second": ours,
        "ratio": statistics.median(b / a for a, b in zip(rates["plain"], rates["hf_cb"], strict=True)),
        "other_cores": usage.other_cores,
        "same_tokens": torch.equal(outputs["plain"], outputs["hf_cb"]),
    }
