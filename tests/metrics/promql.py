"""As much of PromQL as the dashboard is written in, over two scrapes: what Prometheus would answer between them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import promql_parser
from prometheus_client.parser import text_string_to_metric_families

from hf_cb.cli.scrape import quantile

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]


@dataclass(frozen=True)
class Scrapes:
    """The samples of two scrapes that lie so many `seconds` apart: name -> labels -> value."""

    before: dict[str, Vector]
    after: dict[str, Vector]
    seconds: float

    @classmethod
    def of(cls, before: str, after: str, seconds: float) -> Scrapes:
        return cls(_samples(before), _samples(after), seconds)

    def answer(self, query: str) -> Vector:
        """Raises ValueError for what is no PromQL, and KeyError for a metric that isn't there."""
        return self._vector(promql_parser.parse(query))

    def _vector(self, node: Any) -> Vector:
        match type(node).__name__:
            case "VectorSelector":
                return _select(self.after, node)
            case "AggregateExpr":
                return self._aggregate(node)
            case "BinaryExpr":
                assert str(node.op) == "/", node.op
                left, right = self._vector(node.lhs), self._vector(node.rhs)
                return {
                    labels: left[labels] / right[labels] if right[labels] else math.nan for labels in left if labels in right
                }
            case "Call" if node.func.name == "rate":
                selector = node.args[0].vector_selector
                before, after = _select(self.before, selector), _select(self.after, selector)
                return {labels: (value - before.get(labels, 0.0)) / self.seconds for labels, value in after.items()}
            case "Call" if node.func.name == "histogram_quantile":
                return _quantiles(node.args[0].val, self._vector(node.args[1]))
        raise AssertionError(f"the dashboard has come to use more of PromQL: {node}")

    def _aggregate(self, node: Any) -> Vector:
        by = node.modifier.labels if node.modifier else []
        groups: dict[Labels, list[float]] = {}
        for labels, value in self._vector(node.expr).items():
            groups.setdefault(frozenset(pair for pair in labels if pair[0] in by), []).append(value)
        combine: Any = {"sum": sum, "max": max}[str(node.op).split()[0].partition("(")[0]]
        return {labels: combine(values) for labels, values in groups.items()}


def _samples(text: str) -> dict[str, Vector]:
    found: dict[str, Vector] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def _select(samples: dict[str, Vector], selector: Any) -> Vector:
    return {
        labels: value
        for labels, value in samples[selector.name].items()
        if all(_matches(dict(labels).get(m.name, ""), m) for m in selector.matchers.matchers)
    }


def _matches(value: str, matcher: Any) -> bool:
    assert matcher.op in (promql_parser.MatchOp.Equal, promql_parser.MatchOp.Re), matcher
    is_same = matcher.op == promql_parser.MatchOp.Equal
    return value == matcher.value if is_same else re.fullmatch(matcher.value, value) is not None


def _quantiles(q: float, buckets: Vector) -> Vector:
    groups: dict[Labels, dict[float, float]] = {}
    for labels, value in buckets.items():
        rest = frozenset(pair for pair in labels if pair[0] != "le")
        groups.setdefault(rest, {})[float(dict(labels)["le"])] = value
    found = {labels: quantile(dict(sorted(counts.items())), q) for labels, counts in groups.items()}
    return {labels: math.nan if value is None else value for labels, value in found.items()}
