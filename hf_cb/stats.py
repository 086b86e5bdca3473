"""What an engine has done: totals for everybody, and the latest steps one by one for those who asked."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hf_cb.request import FinishReason, Request

# Upper bounds of the ranges, in seconds and in tokens: those that vLLM exports, with a few more at the lower end.
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
BETWEEN_TOKENS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 10, 20, 40, 80),
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
        """How many figures were counted."""
        return sum(self.counts)


class Histogram:
    """Counts figures. Written by one thread; `snapshot` from any."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a figure."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> Distribution:
        """What was counted so far; never less than in an earlier one."""
        return Distribution(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. `started` is on `time.perf_counter()`'s clock; durations in seconds."""

    started: float
    seconds: float
    model_seconds: float
    rows: tuple[tuple[int, int], ...]  # (request id, tokens computed) of every row
    sampled: tuple[int, ...]  # request ids, once for each token that they got
    preempted: tuple[int, ...]
    num_waiting: int
    blocks_used: int  # by the step's sequences
    tokens_stored: int  # keys and values in those blocks
    block_size: int


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request that has ended, in whatever way. Times are on `time.perf_counter()`'s clock, in seconds."""

    request: Request
    finish_reason: FinishReason
    error: str | None  # what its caller is told, if it was not answered
    num_output_tokens: int
    num_cached_tokens: int  # of the prompt, that were in the KV cache already
    submitted_at: float
    admitted_at: float | None  # None: never
    first_token_at: float | None  # None: there was none
    finished_at: float

    @property
    def is_answered(self) -> bool:
        """Whether it ran to an end of its own."""
        return self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class Distributions:
    """Histograms since the engine was made; durations in seconds. The last five are of requests that were answered."""

    time_to_first_token: Distribution = field(metadata={"bounds": FIRST_TOKEN})  # from its submission
    inter_token: Distribution = field(metadata={"bounds": BETWEEN_TOKENS})  # between two of a request; none for one with beams
    queue: Distribution = field(metadata={"bounds": REQUEST})  # from submission to admission
    step_tokens: Distribution = field(metadata={"bounds": STEP_TOKENS})  # that a step computed
    prefill: Distribution = field(metadata={"bounds": REQUEST})  # from admission to the first token
    decode: Distribution = field(metadata={"bounds": REQUEST})  # from the first token to the end
    end_to_end: Distribution = field(metadata={"bounds": REQUEST})  # from submission to the end
    prompt_tokens: Distribution = field(metadata={"bounds": TOKENS})
    output_tokens: Distribution = field(metadata={"bounds": TOKENS})


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Counts are since the engine was made and never fall; durations in seconds."""

    running: int
    waiting: int
    steps: int
    prompt_tokens: int
    output_tokens: int
    preemptions: int
    swaps: int  # preempted sequences that were moved to the host's memory
    finished: Mapping[FinishReason, int]
    num_blocks: int  # of the pool: a sequence takes one per `block_size` tokens for each group of layers of equal reach
    blocks_used: int
    step_seconds: float
    model_seconds: float
    mean_batch_size: float  # rows per step
    kv_waste: float  # share of the slots in used blocks that held nothing, mean over steps
    prefix_hits: int  # requests that began with blocks of the prefix cache
    cached_tokens: int  # prompt tokens that were found there
    native_calls: Mapping[str, int]  # reason -> calls that ran plain generate
    attention_backend: str
    attention_reason: str
    packed_bytes: int  # that copies of the weights take, see CBConfig.pack_memory
    graphs: int  # CUDA graphs of decode steps that there are now
    graph_reason: str  # why there are none or no more
    prefix_reason: str  # whether there is a prefix cache, and why not
    admitted_tokens: int  # prompt tokens of admitted requests: `cached_tokens` are some of these
    rejected: int  # requests that a full queue refused
    max_running: int  # sequences that may run at a time
    distributions: Distributions = field(repr=False)

    def __str__(self) -> str:
        """A line for each figure that is not nothing."""
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.repr}
        width = max(map(len, shown))
        return "\n".join(f"{name:<{width}}  {_in_words(value)}" for name, value in shown.items() if value)


def _in_words(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{count} x {getattr(key, 'value', key)}" for key, count in value.items())
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


class Meter:
    """Adds up steps and requests over an engine's life, whichever engine core does them. Written by the engine thread alone.

    What has the name of a figure of `EngineStats` is that figure.
    """

    def __init__(self, record_steps: int) -> None:
        self.steps = 0
        self.rows = 0
        self.prompt_tokens = 0
        self.prefix_hits = 0
        self.cached_tokens = 0
        self.admitted_tokens = 0
        self.output_tokens = 0
        self.preemptions = 0
        self.swaps = 0
        self.rejected = 0  # with the worker's lock held, by any thread
        self.step_seconds = 0.0
        self.model_seconds = 0.0
        self.waste_sum = 0.0
        self.finished: Counter[FinishReason] = Counter()
        self.records: deque[StepRecord] = deque(maxlen=record_steps)
        self._histograms = {f.name: Histogram(f.metadata["bounds"]) for f in fields(Distributions)}

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def add(self, record: StepRecord) -> None:
        """Count a step."""
        self.steps += 1
        self.rows += len(record.rows)
        self.output_tokens += len(record.sampled)
        self.step_seconds += record.seconds
        self.model_seconds += record.model_seconds
        if record.blocks_used:
            self.waste_sum += 1 - record.tokens_stored / (record.blocks_used * record.block_size)
        self._observe("step_tokens", sum(num_tokens for _, num_tokens in record.rows))
        self.records.append(record)

    def add_admission(self, waited: float, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count a request that gets its first tokens computed, `waited` seconds after it came."""
        self._observe("queue", waited)
        self.admitted_tokens += num_prompt_tokens
        self.cached_tokens += num_cached_tokens
        self.prefix_hits += num_cached_tokens > 0

    def add_first_token(self, seconds: float) -> None:
        """Count a request's first token, so long after the request came."""
        self._observe("time_to_first_token", seconds)

    def add_next_token(self, seconds: float) -> None:
        """Count another one, so long after the one before."""
        self._observe("inter_token", seconds)

    def add_request(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self.finished[record.finish_reason] += 1
        if not record.is_answered or record.admitted_at is None or record.first_token_at is None:
            return
        self._observe("prefill", record.first_token_at - record.admitted_at)
        self._observe("decode", record.finished_at - record.first_token_at)
        self._observe("end_to_end", record.finished_at - record.submitted_at)
        self._observe("prompt_tokens", len(record.request.prompt))
        self._observe("output_tokens", record.num_output_tokens)

    def totals(self) -> dict[str, Any]:
        """What `EngineStats` has of it. Any thread may ask."""
        steps, figures = max(1, self.steps), {f.name for f in fields(EngineStats)}
        return {name: value for name, value in vars(self).items() if name in figures} | {
            "finished": dict(self.finished),
            "mean_batch_size": self.rows / steps,
            "kv_waste": self.waste_sum / steps,
            "distributions": Distributions(**{name: each.snapshot() for name, each in self._histograms.items()}),
        }
