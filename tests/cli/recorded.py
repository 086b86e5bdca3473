"""What a server's /metrics said at two moments, twelve seconds apart: 24 callers of SmolLM2 with 16 slots, two of a tiny model.

The figures are recorded; the text is what the collector makes of them now.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from hf_cb.metrics.collector import EngineCollector
from hf_cb.request import FinishReason
from hf_cb.stats import Distribution, Distributions, EngineStats


@dataclass(frozen=True)
class Recorded:
    """A model's figures at both moments. Those that are not here were zero."""

    figures: dict[str, tuple[float, float]]
    finished: tuple[dict[str, int], dict[str, int]]
    native: dict[str, int]  # at both
    histograms: dict[str, tuple[tuple[dict[float, int], float], ...]]  # name -> ({upper bound: figures below it}, their sum)

    def stats(self, moment: int) -> EngineStats:
        found = {name: figures[moment] for name, figures in self.histograms.items()}
        histograms = {f.name: _histogram(f.metadata["bounds"], *found.get(f.name, ({}, 0))) for f in fields(Distributions)}
        given: dict[str, Any] = {
            **{name: figures[moment] for name, figures in self.figures.items()},
            "finished": {FinishReason(name): count for name, count in self.finished[moment].items()},
            "native_calls": self.native,
            "distributions": Distributions(**histograms),
        }
        return EngineStats(**{f.name: given.get(f.name, 0) for f in fields(EngineStats)})


def _histogram(bounds: tuple[float, ...], counts: dict[float, int], total: float) -> Distribution:
    return Distribution(bounds, (*(counts.get(bound, 0) for bound in bounds), 0), total)


def text(moment: int) -> str:
    """As /metrics has it; 0 is the earlier moment, 1 the later."""
    registry = CollectorRegistry()
    registry.register(
        EngineCollector({name: SimpleNamespace(stats=lambda own=own: own.stats(moment)) for name, own in MODELS.items()})
    )
    return generate_latest(registry).decode()


MODELS = {
    "SmolLM2-135M-Instruct": Recorded(
        {
            "running": (16, 16),
            "waiting": (8, 8),
            "max_running": (16, 16),
            "num_blocks": (400, 400),
            "admitted_tokens": (2120, 2801),
            "cached_tokens": (1280, 1760),
            "prompt_tokens": (2990, 3689),
            "output_tokens": (236, 700),
            "steps": (16, 45),
            "step_seconds": (12.310673, 24.202871),
            "blocks_used": (73, 85),
        },
        ({"length": 1}, {"stop": 1, "length": 6}),
        {"argument position_ids": 2, "num_beam_groups: a decoding mode of its own": 1},
        {
            "time_to_first_token": (({2.5: 1, 7.5: 15, 20: 1}, 96.752), ({2.5: 1, 7.5: 15, 20: 4, 40: 3}, 211.909)),
            "inter_token": (
                ({0.3: 16, 0.4: 128, 0.5: 48, 1: 15, 2.5: 11, 5: 1}, 108.522),
                ({0.3: 144, 0.4: 240, 0.5: 191, 0.75: 45, 1: 45, 2.5: 11, 5: 1}, 295.106),
            ),
            "queue": (
                ({0.05: 1, 1: 6, 1.5: 5, 5: 4, 10: 1}, 40.473),
                ({0.05: 1, 1: 6, 1.5: 5, 5: 4, 10: 1, 15: 1, 20: 2, 30: 3}, 151.697),
            ),
            "end_to_end": (({10: 1}, 9.974), ({10: 1, 15: 1, 20: 2, 30: 3}, 122.008)),
            "step_tokens": (
                ({16: 12, 64: 1, 128: 1, 256: 1, 512: 1}, 1059),
                ({16: 35, 32: 1, 64: 5, 128: 2, 256: 1, 512: 1}, 1718),
            ),
        },
    ),
    "base": Recorded(
        {
            "running": (2, 2),
            "max_running": (256, 256),
            "num_blocks": (32768, 32768),
            "admitted_tokens": (5389, 11177),
            "cached_tokens": (3440, 7360),
            "prompt_tokens": (5389, 11177),
            "output_tokens": (2216, 4410),
            "steps": (1135, 2262),
            "step_seconds": (11.750973, 23.687936),
            "blocks_used": (20, 13),
        },
        ({"length": 42}, {"length": 91}),
        {},
        {
            "time_to_first_token": (
                ({0.01: 4, 0.02: 15, 0.04: 22, 0.06: 3}, 0.985),
                ({0.005: 1, 0.01: 7, 0.02: 39, 0.04: 42, 0.06: 4}, 1.942),
            ),
            "inter_token": (
                ({0.0025: 44, 0.005: 442, 0.01: 262, 0.025: 1387, 0.05: 37}, 22.937),
                ({0.0025: 178, 0.005: 862, 0.01: 595, 0.025: 2583, 0.05: 97, 0.075: 2}, 45.979),
            ),
            "queue": (({0.05: 44}, 0.289), ({0.05: 93}, 0.633)),
            "end_to_end": (
                ({0.1: 1, 0.3: 10, 0.5: 9, 0.8: 10, 1: 9, 1.5: 3}, 22.88),
                ({0.1: 3, 0.3: 22, 0.5: 22, 0.8: 21, 1: 18, 1.5: 5}, 47.758),
            ),
            "step_tokens": (
                ({1: 53, 2: 1038, 8: 2, 16: 5, 32: 7, 64: 21, 128: 8, 256: 1}, 4121),
                ({1: 111, 2: 2060, 8: 3, 16: 12, 32: 20, 64: 38, 128: 17, 256: 1}, 8134),
            ),
        },
    ),
}
