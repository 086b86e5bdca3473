"""One request alone: what the engine costs or saves where there is nothing to batch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import machine, peers
from benchmarks.external import ExternalPeer
from benchmarks.workload import Item, Workload

PROMPT_TOKENS = 128
NEW_TOKENS = 64

Way = Callable[[], tuple[float, list[int]]]  # seconds and the new tokens of one run


def measure(
    model: Any,
    source: Sequence[int],
    repeats: int,
    scale: float = 1.0,
    externals: Mapping[str, ExternalPeer] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Plain `generate`, the engine and `externals` in turns on one prompt.

    Median output tokens per second, the prompt's time included; `ratio`: the engine's to plain, taken within a round.
    """
    item = Item(0, tuple(source[: max(1, round(PROMPT_TOKENS * scale))]), max(2, round(NEW_TOKENS * scale)))
    seconds: dict[str, list[float]] = {}
    tokens: dict[str, list[int]] = {}
    pids = [peer.pid for peer in (externals or {}).values()]
    # Without the prefix cache: the prompt is the same in every round, and plain generate computes it every time.
    with peers.installed(model, **{"prefix_cache": False, **options}), machine.usage(*pids) as usage:
        # install() gives this instance a `generate` of its own; the class keeps the plain one.
        ways = {"plain": _by_generate(model, item, lambda **kwargs: type(model).generate(model, **kwargs))}
        ways["hf_cb"] = _by_generate(model, item, model.generate)
        ways |= {name: _by_external(item, peer) for name, peer in (externals or {}).items()}
        for round_ in tqdm(range(-1, repeats), desc="one request alone", unit="round", leave=False):
            for name, way in ways.items():
                took, tokens[name] = way()
                if round_ >= 0:  # the first is the warm-up
                    seconds.setdefault(name, []).append(took)
    return {
        "prompt_tokens": len(item.prompt),
        "new_tokens": item.output_length,
        "tokens_per_second": {name: item.output_length / statistics.median(took) for name, took in seconds.items()},
        "ratios": {  # hf_cb's to each
            name: statistics.median(a / b for a, b in zip(took, seconds["hf_cb"], strict=True))
            for name, took in seconds.items()
        },
        "other_cores": usage.other_cores,
        "same_tokens": tokens["plain"] == tokens["hf_cb"],
    }


def _by_generate(model: Any, item: Item, generate: Callable[..., torch.Tensor]) -> Way:
    ids = torch.tensor([item.prompt], device=model.device)

    def way() -> tuple[float, list[int]]:
        start = time.perf_counter()
        output = generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=item.output_length)
        tokens = output[0, ids.shape[1] :].tolist()
        return time.perf_counter() - start, tokens

    return way


def _by_external(item: Item, peer: ExternalPeer) -> Way:
    def way() -> tuple[float, list[int]]:
        outcome = peer.run(Workload((item,)), lambda _: None, 1)
        return outcome.wall_seconds, list(outcome.rows[0].tokens)

    return way
