"""Scrape: a server's /metrics at one moment, and what two of them say of the time between."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_cb.errors import InvalidArgumentError

_PREFIX = "hf_cb_"
Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """`at`: seconds on any clock. `values`: for each model, (name without prefix, labels without the model) -> value."""

    at: float
    values: Mapping[str, Mapping[tuple[str, Labels], float]]

    @classmethod
    def parse(cls, text: str, at: float) -> Scrape:
        """Of the text of /metrics. Raises InvalidArgumentError if it has no metric of ours."""
        from prometheus_client.parser import text_string_to_metric_families

        values: dict[str, dict[tuple[str, Labels], float]] = {}
        try:
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        except ValueError as error:
            raise InvalidArgumentError(f"URL: /metrics is not in Prometheus' text format ({error})") from None
        for sample in samples:
            if sample.name.startswith(_PREFIX) and "model" in sample.labels:
                labels = frozenset((name, value) for name, value in sample.labels.items() if name != "model")
                values.setdefault(sample.labels["model"], {})[sample.name.removeprefix(_PREFIX), labels] = sample.value
        if not values:
            raise InvalidArgumentError("URL: /metrics has no metrics of hf_cb; is it an hf-cb server?")
        return cls(at, values)

    def value(self, model: str, name: str, **labels: str) -> float:
        """One sample; 0 if there is none."""
        return self.values.get(model, {}).get((name, frozenset(labels.items())), 0.0)

    def by_label(self, model: str, name: str) -> dict[str, float]:
        """The samples of a metric with one label, by its value."""
        found = self.values.get(model, {})
        return {next(iter(labels))[1]: value for (known, labels), value in found.items() if known == name and labels}

    def buckets(self, model: str, name: str) -> dict[float, float]:
        """Upper bound -> figures up to it, of a histogram, from the lowest bound."""
        return dict(sorted((float(bound), count) for bound, count in self.by_label(model, f"{name}_bucket").items()))


@dataclass(frozen=True, slots=True)
class Between:
    """What happened between two scrapes. A counter that fell began anew (the server was restarted): it counts from zero."""

    before: Scrape
    after: Scrape

    def rise(self, model: str, name: str, **labels: str) -> float:
        """By how much a counter grew."""
        return _rise(self.before.value(model, name, **labels), self.after.value(model, name, **labels))

    def rate(self, model: str, name: str, **labels: str) -> float:
        """By how much a counter has grown, per second."""
        return self.rise(model, name, **labels) / max(1e-9, self.after.at - self.before.at)

    def quantile(self, model: str, name: str, q: float) -> float | None:
        """The `q`-quantile (0 to 1) of what a histogram counted between the two; None if that was nothing.

        Linear inside a bucket, as Prometheus' histogram_quantile; above the highest bound, that bound.
        """
        before = self.before.buckets(model, name)
        rises = {bound: _rise(before.get(bound, 0.0), count) for bound, count in self.after.buckets(model, name).items()}
        return quantile(rises, q)


def quantile(cumulative: Mapping[float, float], q: float) -> float | None:
    """Of a histogram: upper bound -> figures up to it, from the lowest bound to infinity. None: there are no figures."""
    total = max(cumulative.values(), default=0.0)
    if total <= 0:
        return None
    lower = count_below = 0.0
    for bound, count in cumulative.items():
        if count >= q * total:
            if bound == math.inf:
                return lower
            share = (q * total - count_below) / (count - count_below) if count > count_below else 1.0
            return lower + (bound - lower) * share
        lower, count_below = bound, count
    return lower


def _rise(before: float, after: float) -> float:
    return after - before if after >= before else after


class History:
    """The latest scrapes, oldest first, no more than `seconds` back (and at least two)."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._scrapes: list[Scrape] = []

    def add(self, scrape: Scrape) -> None:
        """Append a scrape."""
        self._scrapes.append(scrape)
        while len(self._scrapes) > 2 and scrape.at - self._scrapes[1].at >= self._seconds:
            self._scrapes.pop(0)

    @property
    def latest(self) -> Scrape:
        """The newest scrape."""
        return self._scrapes[-1]

    def last(self) -> Between:
        """The newest two scrapes."""
        return Between(self._scrapes[-2 if len(self._scrapes) > 1 else -1], self._scrapes[-1])

    def window(self) -> Between:
        """The oldest scrape and the newest."""
        return Between(self._scrapes[0], self._scrapes[-1])

    def rates(self, model: str, name: str) -> Sequence[float]:
        """A counter's rate between each two neighbours, oldest first."""
        return [Between(*pair).rate(model, name) for pair in itertools.pairwise(self._scrapes)]
