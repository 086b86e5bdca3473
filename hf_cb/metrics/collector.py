"""EngineCollector: what engines' `stats()` say, in Prometheus' form, read when it is asked for. Needs the extra `metrics`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from hf_cb.engine import Engine
from hf_cb.metrics import catalog
from hf_cb.stats import Distribution, EngineStats


class EngineCollector(Collector):
    """The metrics of `catalog.METRICS` for any number of engines, told apart by the label `model`.

    Register it where your program keeps its metrics, `REGISTRY.register(EngineCollector({"my-model": engine}))`, or let a
    server answer with `exposition()`. Nothing is measured here: an engine that nobody asks costs nothing.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        """`engines`: by the names of their models. The mapping is looked at anew each time."""
        self._engines = engines
        self._own = CollectorRegistry()
        self._own.register(self)
        ProcessCollector(registry=self._own)

    def describe(self) -> Iterator[Metric]:
        """The names, without asking an engine."""
        for metric in catalog.METRICS:
            yield _family(metric)

    def collect(self) -> Iterator[Metric]:
        """The families, with a sample or more for each engine."""
        stats = {name: engine.stats() for name, engine in list(self._engines.items())}
        for metric in catalog.METRICS:
            family = _family(metric)
            for name, snapshot in stats.items():
                _add(family, metric, name, snapshot)
            yield family

    def exposition(self) -> tuple[bytes, str]:
        """All of it, and this process's memory, processor time and open files: (text, its content type)."""
        return generate_latest(self._own), CONTENT_TYPE_LATEST


Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily
_FAMILIES: dict[str, type[Family]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _family(metric: catalog.Metric) -> Family:
    labels = [catalog.MODEL, *([metric.label] if metric.label else [])]
    return _FAMILIES[metric.kind](f"{catalog.PREFIX}{metric.name}", metric.help, labels=labels)


def _add(family: Family, metric: catalog.Metric, model: str, stats: EngineStats) -> None:
    value = metric.read(stats)
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(value, Distribution)
        family.add_metric([model], _buckets(value), value.total)
    elif isinstance(value, Mapping):
        for label, number in value.items():
            family.add_metric([model, label], number)
    else:
        assert not isinstance(value, Distribution)
        family.add_metric([model], value)


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """(upper bound, figures up to it) each: Prometheus counts cumulatively."""
    pairs, sum_so_far = [], 0
    for bound, count in zip((*distribution.bounds, math.inf), distribution.counts, strict=True):
        sum_so_far += count
        pairs.append(("+Inf" if bound == math.inf else str(float(bound)), float(sum_so_far)))
    return pairs
