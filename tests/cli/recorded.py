"""What a server's /metrics said at two moments, twelve seconds apart: 24 callers of SmolLM2 with 16 slots, two of a tiny model.

The figures are recorded; the text is what the collector makes of them now.
"""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest

from hf_cb.metrics.collector import EngineCollector
from hf_cb.request import FinishReason
from hf_cb.stats import Distribution, Distributions, EngineStats


class Recorded(NamedTuple):
    """A model's figures. Those that are not here were zero."""

    figures: dict[str, float]
    finished: dict[str, int]
    native: dict[str, int]
    histograms: dict[str, tuple[dict[float, int], float]]  # name -> (upper bound of a range -> figures in it, their sum)


def _histogram(bounds: tuple[float, ...], counts: dict[float, int], total: float) -> Distribution:
    return Distribution(bounds, (*(counts.get(bound, 0) for bound in bounds), 0), total)


def _stats(recorded: Recorded) -> EngineStats:
    histograms = {
        f.name: _histogram(f.metadata["bounds"], *recorded.histograms.get(f.name, ({}, 0))) for f in fields(Distributions)
    }
    given: dict[str, Any] = {
        **recorded.figures,
        "finished": {FinishReason(name): count for name, count in recorded.finished.items()},
        "native_calls": recorded.native,
        "distributions": Distributions(**histograms),
    }
    return EngineStats(**{f.name: given.get(f.name, 0) for f in fields(EngineStats)})


def text(recorded: dict[str, Recorded]) -> str:
    """As /metrics has it."""
    registry = CollectorRegistry()
    engines = {name: SimpleNamespace(stats=lambda own=own: _stats(own)) for name, own in recorded.items()}
    registry.register(EngineCollector(engines))
    return generate_latest(registry).decode()


EARLIER = {
    "SmolLM2-135M-Instruct": Recorded(
        {
            "running": 16,
            "waiting": 8,
            "max_running": 16,
            "num_blocks": 400,
            "admitted_tokens": 2120,
            "cached_tokens": 1280,
            "prompt_tokens": 2990,
            "output_tokens": 236,
            "steps": 16,
            "step_seconds": 12.310673,
            "model_seconds": 12.262799,
            "blocks_used": 73,
        },
        {"length": 1},
        {"argument position_ids": 2, "num_beam_groups: a decoding mode of its own": 1},
        {
            "time_to_first_token": ({2.5: 1, 7.5: 15, 20: 1}, 96.752),
            "inter_token": ({0.3: 16, 0.4: 128, 0.5: 48, 1: 15, 2.5: 11, 5: 1}, 108.522),
            "queue": ({0.05: 1, 1: 6, 1.5: 5, 5: 4, 10: 1}, 40.473),
            "prefill": ({1.5: 1}, 1.056),
            "decode": ({10: 1}, 8.901),
            "end_to_end": ({10: 1}, 9.974),
            "prompt_tokens": ({200: 1}, 102),
            "output_tokens": ({20: 1}, 11),
            "step_tokens": ({16: 12, 64: 1, 128: 1, 256: 1, 512: 1}, 1059),
        },
    ),
    "base": Recorded(
        {
            "running": 2,
            "max_running": 256,
            "num_blocks": 32768,
            "admitted_tokens": 5389,
            "cached_tokens": 3440,
            "prompt_tokens": 5389,
            "output_tokens": 2216,
            "steps": 1135,
            "step_seconds": 11.750973,
            "model_seconds": 9.430334,
            "blocks_used": 20,
        },
        {"length": 42},
        {},
        {
            "time_to_first_token": ({0.01: 4, 0.02: 15, 0.04: 22, 0.06: 3}, 0.985),
            "inter_token": ({0.0025: 44, 0.005: 442, 0.01: 262, 0.025: 1387, 0.05: 37}, 22.937),
            "queue": ({0.05: 44}, 0.289),
            "prefill": ({0.05: 42}, 0.676),
            "decode": ({0.1: 3, 0.3: 9, 0.5: 9, 0.8: 10, 1: 10, 1.5: 1}, 21.924),
            "end_to_end": ({0.1: 1, 0.3: 10, 0.5: 9, 0.8: 10, 1: 9, 1.5: 3}, 22.88),
            "prompt_tokens": ({100: 11, 200: 31}, 5096),
            "output_tokens": ({10: 3, 20: 6, 50: 12, 100: 21}, 2122),
            "step_tokens": ({1: 53, 2: 1038, 8: 2, 16: 5, 32: 7, 64: 21, 128: 8, 256: 1}, 4121),
        },
    ),
}
LATER = {
    "SmolLM2-135M-Instruct": Recorded(
        {
            "running": 16,
            "waiting": 8,
            "max_running": 16,
            "num_blocks": 400,
            "admitted_tokens": 2801,
            "cached_tokens": 1760,
            "prompt_tokens": 3689,
            "output_tokens": 700,
            "steps": 45,
            "step_seconds": 24.202871,
            "model_seconds": 23.971909,
            "blocks_used": 85,
        },
        {"stop": 1, "length": 6},
        {"argument position_ids": 2, "num_beam_groups: a decoding mode of its own": 1},
        {
            "time_to_first_token": ({2.5: 1, 7.5: 15, 20: 4, 40: 3}, 211.909),
            "inter_token": ({0.3: 144, 0.4: 240, 0.5: 191, 0.75: 45, 1: 45, 2.5: 11, 5: 1}, 295.106),
            "queue": ({0.05: 1, 1: 6, 1.5: 5, 5: 4, 10: 1, 15: 1, 20: 2, 30: 3}, 151.697),
            "prefill": ({0.5: 1, 0.8: 1, 1.5: 1, 2: 1, 5: 2, 10: 1}, 18.398),
            "decode": ({10: 4, 15: 2, 20: 1}, 72.342),
            "end_to_end": ({10: 1, 15: 1, 20: 2, 30: 3}, 122.008),
            "prompt_tokens": ({200: 7}, 857),
            "output_tokens": ({20: 3, 50: 4}, 174),
            "step_tokens": ({16: 35, 32: 1, 64: 5, 128: 2, 256: 1, 512: 1}, 1718),
        },
    ),
    "base": Recorded(
        {
            "running": 2,
            "max_running": 256,
            "num_blocks": 32768,
            "admitted_tokens": 11177,
            "cached_tokens": 7360,
            "prompt_tokens": 11177,
            "output_tokens": 4410,
            "steps": 2262,
            "step_seconds": 23.687936,
            "model_seconds": 18.953716,
            "blocks_used": 13,
        },
        {"length": 91},
        {},
        {
            "time_to_first_token": ({0.005: 1, 0.01: 7, 0.02: 39, 0.04: 42, 0.06: 4}, 1.942),
            "inter_token": ({0.0025: 178, 0.005: 862, 0.01: 595, 0.025: 2583, 0.05: 97, 0.075: 2}, 45.979),
            "queue": ({0.05: 93}, 0.633),
            "prefill": ({0.05: 91}, 1.279),
            "decode": ({0.1: 7, 0.3: 20, 0.5: 22, 0.8: 23, 1: 16, 1.5: 3}, 45.864),
            "end_to_end": ({0.1: 3, 0.3: 22, 0.5: 22, 0.8: 21, 1: 18, 1.5: 5}, 47.758),
            "prompt_tokens": ({100: 22, 200: 69}, 10922),
            "output_tokens": ({10: 6, 20: 10, 50: 35, 100: 40}, 4397),
            "step_tokens": ({1: 111, 2: 2060, 8: 3, 16: 12, 32: 20, 64: 38, 128: 17, 256: 1}, 8134),
        },
    ),
}
