"""Trace: what an engine does while requests run, phase by phase, taken from the functions that do it."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from hf_cb.answers import Answers
from hf_cb.core.output import ScheduledRow, SchedulerOutput
from hf_cb.core.scheduler import Scheduler
from hf_cb.engine_core import EngineCore
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

WEIGHTS, BETWEEN = "check weights", "between"
"""What comes before `schedule`: the look whether the model's weights have changed. And the rest."""

Span = tuple[str, float, float]  # phase, began and ended on `time.perf_counter()`'s clock


@dataclass(slots=True)
class Trace:
    """`began`: when each step did; `steps`: its phases; `outputs`: what it decided to compute."""

    began: list[float] = field(default_factory=list)
    steps: list[list[Span]] = field(default_factory=list)
    outputs: list[SchedulerOutput] = field(default_factory=list)

    def rows_of(self, request_id: int) -> list[ScheduledRow]:
        """A request's part of each step in which it had one."""
        return [row for output in self.outputs for row in output.rows if row.request_id == request_id]

    def decode_milliseconds(self) -> dict[str, float]:
        """Median duration of each phase over the steps with the most rows of one token each."""
        rows = {i: len(o.rows) for i, o in enumerate(self.outputs) if all(len(row.token_ids) == 1 for row in o.rows)}
        durations = [self._durations(i) for i, count in rows.items() if count == max(rows.values())]
        return {phase: 1e3 * statistics.median(taken[phase] for taken in durations) for phase in durations[0]}

    def _durations(self, i: int) -> dict[str, float]:
        spans = self.steps[i]
        taken = {WEIGHTS: spans[0][1] - self.began[i], **dict.fromkeys(PHASES, 0.0)}
        for phase, began, ended in spans:
            taken[phase] += ended - began
        return {**taken, BETWEEN: spans[-1][2] - self.began[i] - sum(taken.values())}


@contextmanager
def traced() -> Iterator[Trace]:
    """Every engine's steps in the body, as if there were one engine. Engines must not overlap their steps."""
    trace = Trace()
    with ExitStack() as stack:
        stack.enter_context(patch.object(EngineCore, "step", _begun(EngineCore.step, trace)))
        for phase, (owner, name) in PHASES.items():
            stack.enter_context(patch.object(owner, name, _timed(getattr(owner, name), phase, trace)))
        yield trace


def _begun(function: Callable[..., Any], trace: Trace) -> Callable[..., Any]:
    def begun(*args: Any, **kwargs: Any) -> Any:
        trace.began.append(time.perf_counter())
        trace.steps.append([])
        return function(*args, **kwargs)

    return begun


def _timed(function: Callable[..., Any], phase: str, trace: Trace) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = function(*args, **kwargs)
        trace.steps[-1].append((phase, began, time.perf_counter()))
        if isinstance(result, SchedulerOutput):
            trace.outputs.append(result)
        return result

    return timed


def shared_blocks(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """How many blocks two tables have in common at their beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
