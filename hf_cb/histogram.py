"""Histogram: how often a figure fell into which range. A few counts, however many figures."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

# Upper bounds of the ranges, in seconds and in tokens: those that vLLM exports, with a few more at the lower end.
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
BETWEEN_TOKENS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    20,
    40,
    80,
)
REQUEST = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram at one moment. `counts[i]`: figures in (bounds[i - 1], bounds[i]]; the last: those above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float  # sum of the figures

    @property
    def count(self) -> int:
        """How many figures."""
        return sum(self.counts)


class Histogram:
    """Counts figures. Written by one thread; `snapshot` from any."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> Distribution:
        """What was counted so far; never less than in an earlier one."""
        return Distribution(self._bounds, tuple(self._counts), self._total)
