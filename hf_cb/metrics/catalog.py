"""The metrics, as data: name, kind, help, and where `Engine.stats()` has the value. Names are vLLM's where it has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from hf_cb.request import FinishReason
from hf_cb.stats import Distribution, EngineStats

PREFIX = "hf_cb_"
MODEL = "model"
"""The label that every metric has: the name of the engine's model."""

Value = float | Distribution | Mapping[str, float]
"""Of a gauge or counter, of a histogram, or of a metric with a label of its own: label value -> number."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of an engine. `label`: its own label, beside the model."""

    name: str  # without prefix, nor the suffix _total of a counter
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    read: Callable[[EngineStats], Value]
    label: str | None = None

    @property
    def full_name(self) -> str:
        """As queries name it; a histogram's are this with _bucket, _count and _sum."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


def _histogram(name: str, help: str, field: str) -> Metric:
    """A metric that is a field of `Distributions`."""
    return Metric(name, "histogram", help, lambda stats: getattr(stats.distributions, field))


METRICS = (
    Metric("num_requests_running", "gauge", "Sequences in the batch; a beam search counts as its beams.", lambda s: s.running),
    Metric("num_requests_waiting", "gauge", "Requests that wait to be admitted, or were preempted.", lambda s: s.waiting),
    Metric("batch_slots", "gauge", "Sequences that may run at a time.", lambda s: s.max_running),
    Metric("kv_cache_blocks", "gauge", "Blocks of the KV cache.", lambda s: s.num_blocks),
    Metric(
        "kv_cache_usage_ratio",
        "gauge",
        "Share of the KV cache's blocks that running sequences hold, 0 to 1.",
        lambda s: s.blocks_used / s.num_blocks if s.num_blocks else 0.0,
    ),
    Metric("prefix_cache_queries", "counter", "Prompt tokens of admitted requests.", lambda s: s.admitted_tokens),
    Metric("prefix_cache_hits", "counter", "Those of them that were in the KV cache already.", lambda s: s.cached_tokens),
    Metric("num_preemptions", "counter", "Sequences that lost their blocks and wait again.", lambda s: s.preemptions),
    Metric("num_swaps", "counter", "Those of them that were moved to the host's memory.", lambda s: s.swaps),
    Metric("prompt_tokens", "counter", "Tokens of the prompts that came in.", lambda s: s.prompt_tokens),
    Metric("generation_tokens", "counter", "Tokens that were generated.", lambda s: s.output_tokens),
    Metric(
        "request_success",
        "counter",
        "Requests that ended, by how: stop and length are answers.",
        lambda s: {reason.value: s.finished.get(reason, 0) for reason in FinishReason},
        "finished_reason",
    ),
    Metric("requests_rejected", "counter", "Requests that a full queue refused.", lambda s: s.rejected),
    Metric("native_calls", "counter", "Calls that ran plain generate(), by why.", lambda s: s.native_calls, "reason"),
    Metric("engine_steps", "counter", "Steps of the engine.", lambda s: s.steps),
    Metric("engine_step_seconds", "counter", "Seconds that the steps took.", lambda s: s.step_seconds),
    Metric("engine_model_seconds", "counter", "Seconds of them in the model's forward.", lambda s: s.model_seconds),
    _histogram("time_to_first_token_seconds", "From a request's submission to its first token.", "time_to_first_token"),
    _histogram("inter_token_latency_seconds", "Between two tokens of a request.", "inter_token"),
    _histogram("request_queue_time_seconds", "From submission to admission.", "queue"),
    _histogram("request_prefill_time_seconds", "From admission to the first token, of answered requests.", "prefill"),
    _histogram("request_decode_time_seconds", "From the first token to the end, of answered requests.", "decode"),
    _histogram("e2e_request_latency_seconds", "From submission to the end, of answered requests.", "end_to_end"),
    _histogram("request_prompt_tokens", "Prompts of answered requests.", "prompt_tokens"),
    _histogram("request_generation_tokens", "Outputs of answered requests.", "output_tokens"),
    _histogram("iteration_tokens", "Tokens that one step computed.", "step_tokens"),
)


def markdown() -> str:
    """The metrics as a table for the docs."""
    lines = ["| metric | kind | |", "|---|---|---|"]
    for metric in METRICS:
        own = f" (label `{metric.label}`)" if metric.label else ""
        lines.append(f"| `{metric.full_name}` | {metric.kind} | {metric.help}{own} |")
    return "\n".join(lines)
