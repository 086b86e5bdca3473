"""RunningMean: an average that follows what is measured."""

from __future__ import annotations

_WEIGHT = 0.25  # of the latest measurement


class RunningMean:
    """`guess`: its value before anything was measured; 0: the first measurement counts whole."""

    def __init__(self, guess: float = 0.0) -> None:
        self.value = guess

    def observe(self, latest: float) -> None:
        """Take in a measurement."""
        self.value += (_WEIGHT if self.value else 1.0) * (latest - self.value)
