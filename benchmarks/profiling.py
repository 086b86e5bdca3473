"""Where a run's time goes: torch's profiler over the engine's thread, grouped, beside the engine's own clock."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

from benchmarks import peers
from benchmarks.workload import Workload

# The first pattern that an op's name holds decides its group. Greedy decoding takes no softmax outside attention.
_GROUPS = (
    ("fused layers", re.compile(r"hf_cb::(before_attention|after_attention|gated)")),
    ("attention", re.compile(r"attention|attend|sdpa|flash|paged|varlen|bmm|softmax", re.IGNORECASE)),
    ("linear layers", re.compile(r"linear|addmm|::mm\b|matmul|mkldnn|onednn|gemm", re.IGNORECASE)),
    ("sampling", re.compile(r"argmax|multinomial|sort|topk|exponential|searchsorted|cumsum")),
    ("norms, activations, rotary", re.compile(r"norm|rsqrt|pow|mean|silu|gelu|::mul|::add|neg|cos|sin\b|sigmoid|tanh|rope")),
    ("indexing: embedding, keys and values", re.compile(r"embedding|index|gather|scatter")),
    ("copies", re.compile(r"copy|clone|contiguous|::cat|fill|zero|::to\b")),
)
_TOP = 15


def run(model: Any, workload: Workload, concurrency: int, **options: Any) -> dict[str, Any]:
    """One profiled run: self time of the engine thread's ops, by op and by group, and the steps' own split, in seconds."""
    every_thread = _ExperimentalConfig(profile_all_threads=True)  # the ops run on the engine's
    with peers.installed(model, record_steps=peers.ALL_STEPS, **options) as engine:
        peers.serve_by_generate(model, workload.warmup(), lambda _: None, concurrency)
        warmed_up = len(engine.steps())
        with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as profiler:
            _, wall = peers.serve_by_generate(model, workload, lambda _: None, concurrency)
        steps = engine.steps()[warmed_up:]
    outside = 1 - sum(step.model_seconds for step in steps) / sum(step.seconds for step in steps)
    return summary(_engine_thread(profiler.events()), wall, outside)


_OF_THE_MODEL = ("fused layers", "attention", "linear layers")


def _engine_thread(events: Iterable[Any]) -> dict[str, float]:
    """Self seconds by op, of the thread that spent most in the model's: the engine's. Its ops' self times cannot overlap."""
    threads: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        threads[event.thread][event.name] += event.self_cpu_time_total / 1e6
    in_model = {thread: sum(ops[op] for op in ops if group_of(op) in _OF_THE_MODEL) for thread, ops in threads.items()}
    return dict(threads[max(in_model, key=in_model.__getitem__)]) if in_model else {}


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
