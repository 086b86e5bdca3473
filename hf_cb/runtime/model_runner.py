"""ModelRunner: executes a scheduled step. The only caller of the model."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hf_cb.core.output import SchedulerOutput, StepResult
from hf_cb.request import Request
from hf_cb.runtime.input_batch import InputBatch, build_input_batch
from hf_cb.runtime.port import AttentionPort
from hf_cb.runtime.sampler import RowState, sample

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(input_ids [1, T], position_ids [1, T], logits_indices [n]) -> logits [n, vocab]."""


class ModelRunner:
    """Owns what a step needs besides the schedule: the model, its port, the sampling state of each request."""

    def __init__(self, forward: Forward, port: AttentionPort, block_size: int, device: torch.device) -> None:
        self._forward = forward
        self._port = port
        self._block_size = block_size
        self._device = device
        self._rows: dict[int, RowState] = {}
        self.model_seconds = 0.0  # in the latest step

    def add(self, request: Request) -> None:
        """Make ready to sample for `request`."""
        self._rows[request.request_id] = RowState.of(request, self._device)

    def remove(self, request_id: int) -> None:
        """Forget a request; unknown ids are fine."""
        self._rows.pop(request_id, None)

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Compute the step. On an exception nothing has been sampled: the same output may be executed again."""
        with torch.inference_mode():
            batch = build_input_batch(output, self._block_size, self._device)
            began = time.perf_counter()
            logits = self.forward(batch)
            self.model_seconds = time.perf_counter() - began
            if not batch.sampling_ids:
                return StepResult({})
            sampled = sample(logits, [self._rows[request_id] for request_id in batch.sampling_ids])
        errors = {batch.sampling_ids[i]: error for i, error in sampled.errors.items()}
        tokens = dict(zip(batch.sampling_ids, sampled.tokens, strict=True))
        stopped = frozenset(batch.sampling_ids[i] for i in sampled.stopped)
        return StepResult({key: token for key, token in tokens.items() if key not in errors}, dict(errors), stopped)

    def forward(self, batch: InputBatch) -> torch.Tensor:
        """Logits [n, vocab] of the rows that sample; writes every row's keys and values."""
        self._port.begin(batch.step)
        try:
            return self._forward(batch.input_ids, batch.position_ids, batch.logits_indices)
        finally:
            self._port.end()
