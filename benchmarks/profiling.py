"""Where a run's time goes: torch's profiler over the engine's thread, grouped, beside the engine's own clock."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

from benchmarks import peers
from benchmarks.workload import Workload

# The first pattern that an op's name holds decides its group.
_GROUPS = (
    ("attention", re.compile(r"attention|attend|sdpa|flash|paged|varlen", re.IGNORECASE)),
    ("linear layers", re.compile(r"linear|addmm|\bmm\b|bmm|matmul|mkldnn|onednn|gemm|reorder", re.IGNORECASE)),
    ("sampling", re.compile(r"argmax|softmax|multinomial|sort|topk|exponential|searchsorted|cumsum", re.IGNORECASE)),
    ("norms, activations, rotary", re.compile(r"norm|rsqrt|pow|mean|silu|gelu|\bmul|\badd|neg|cat|cos|sin|sigmoid|tanh")),
    ("embedding, indexing", re.compile(r"embedding|index|gather|scatter|select")),
)
_TOP = 15


def run(model: Any, workload: Workload, concurrency: int, **options: Any) -> dict[str, Any]:
    """One profiled run: self time by op and by group, and the steps' own split. Seconds of one thread's wall clock."""
    # All threads: the ops run on the engine's thread, which starts inside.
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as profiler:
        outcome = peers.hf_cb_generate(model, workload, lambda _: None, concurrency, **options).check(workload)
    ops = {event.key: event.self_cpu_time_total / 1e6 for event in profiler.key_averages()}
    return summary(ops, outcome.wall_seconds, outcome.outside_model or 0.0)


def summary(ops: Mapping[str, float], wall_seconds: float, outside_model: float) -> dict[str, Any]:
    """Ops' self seconds grouped, and the rest of the wall clock: Python, scheduling, and what the profiler itself costs."""
    groups: defaultdict[str, float] = defaultdict(float)
    for name, seconds in ops.items():
        groups[group_of(name)] += seconds
    groups["outside any op (Python, scheduling, waiting)"] = max(0.0, wall_seconds - sum(ops.values()))
    top = sorted(ops.items(), key=lambda pair: -pair[1])[:_TOP]
    return {"wall_seconds": wall_seconds, "outside_model": outside_model, "groups": dict(groups), "top": dict(top)}


def group_of(op: str) -> str:
    """The group that an op's self time counts in."""
    return next((group for group, pattern in _GROUPS if pattern.search(op)), "other ops")


def render(result: Mapping[str, Any]) -> str:
    wall = result["wall_seconds"]
    lines = [
        f"profile of one run, {wall:.1f} s (slower than without the profiler)",
        f"outside the model: {result['outside_model']:.1%} of the steps' time",
    ]
    for title, part in (("group", result["groups"]), ("op, self time", result["top"])):
        lines += ["", f"{title:48}  seconds  share"]
        lines += [f"{name[:48]:48}  {s:7.2f}  {s / wall:5.1%}" for name, s in sorted(part.items(), key=lambda pair: -pair[1])]
    return "\n".join(lines)
