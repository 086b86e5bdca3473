"""What an engine has done: totals for everybody, and the latest steps one by one for those who asked."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from hf_cb.request import FinishReason


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. `started` is on `time.perf_counter()`'s clock; durations in seconds."""

    started: float
    seconds: float
    model_seconds: float
    rows: tuple[tuple[int, int], ...]  # (request id, tokens computed) of every row
    sampled: tuple[int, ...]  # request ids that got a token
    preempted: tuple[int, ...]
    num_waiting: int
    blocks_used: int  # by the step's sequences
    tokens_stored: int  # keys and values in those blocks
    block_size: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Counts are since the engine was made; durations in seconds."""

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
    compile_reason: str  # what became of CBConfig.compile


class Meter:
    """Adds up steps. Written by the engine thread alone."""

    def __init__(self, record_steps: int) -> None:
        self.steps = 0
        self.rows = 0
        self.prompt_tokens = 0
        self.prefix_hits = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.step_seconds = 0.0
        self.model_seconds = 0.0
        self.waste_sum = 0.0
        self.finished: Counter[FinishReason] = Counter()
        self.records: deque[StepRecord] = deque(maxlen=record_steps)

    def add(self, record: StepRecord) -> None:
        """Count a step."""
        self.steps += 1
        self.rows += len(record.rows)
        self.output_tokens += len(record.sampled)
        self.step_seconds += record.seconds
        self.model_seconds += record.model_seconds
        if record.blocks_used:
            self.waste_sum += 1 - record.tokens_stored / (record.blocks_used * record.block_size)
        self.records.append(record)
