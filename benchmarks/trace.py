"""Trace: what an engine does while requests run, phase by phase, taken from the functions that do it."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from hf_cb.answers import Answers
from hf_cb.core.output import ScheduledRow, SchedulerOutput
from hf_cb.core.scheduler import Scheduler
from hf_cb.runtime import model_runner
from hf_cb.runtime.model_runner import ModelRunner

PHASES: Mapping[str, tuple[Any, str]] = {
    "schedule": (Scheduler, "schedule"),
    "build batch": (model_runner, "build_input_batch"),
    "forward": (ModelRunner, "forward"),
    "sample": (model_runner, "choose"),
    "update": (Scheduler, "settle"),
    "emit": (Answers, "give"),
}
"""The functions in which a step's time goes, in their order. `emit` is called once for each row."""

Span = tuple[str, float, float]  # phase, began and ended on `time.perf_counter()`'s clock


@dataclass(slots=True)
class Trace:
    """`steps`: the phases of each step, which begins with `schedule`; `outputs`: what that decided."""

    steps: list[list[Span]] = field(default_factory=list)
    outputs: list[SchedulerOutput] = field(default_factory=list)

    def rows_of(self, request_id: int) -> list[ScheduledRow]:
        """A request's part of each step in which it had one."""
        return [row for output in self.outputs for row in output.rows if row.request_id == request_id]

    def decode_milliseconds(self) -> dict[str, float]:
        """Median duration of each phase, and of the rest ("between"), over the steps with the most rows of one token each."""
        rows = {i: len(o.rows) for i, o in enumerate(self.outputs) if all(len(row.token_ids) == 1 for row in o.rows)}
        most = max(rows.values())
        chosen = [self.steps[i] for i, count in rows.items() if count == most]
        durations: defaultdict[str, list[float]] = defaultdict(list)
        for spans in chosen:
            taken = dict.fromkeys(PHASES, 0.0)
            for phase, began, ended in spans:
                taken[phase] += 1e3 * (ended - began)
            whole = 1e3 * (spans[-1][2] - spans[0][1])
            for phase, milliseconds in (*taken.items(), ("between", whole - sum(taken.values()))):
                durations[phase].append(milliseconds)
        return {phase: statistics.median(values) for phase, values in durations.items()}


@contextmanager
def traced() -> Iterator[Trace]:
    """Every engine's steps in the body, as if there were one engine."""
    trace = Trace()
    with ExitStack() as stack:
        for phase, (owner, name) in PHASES.items():
            stack.enter_context(patch.object(owner, name, _timed(getattr(owner, name), phase, trace)))
        yield trace


def _timed(function: Callable[..., Any], phase: str, trace: Trace) -> Callable[..., Any]:
    first = next(iter(PHASES))

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = function(*args, **kwargs)
        if phase == first:
            trace.steps.append([])
            trace.outputs.append(result)
        trace.steps[-1].append((phase, began, time.perf_counter()))
        return result

    return timed


def shared_blocks(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """How many blocks two tables have in common at their beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
