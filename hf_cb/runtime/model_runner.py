"""ModelRunner: executes a scheduled step. The only caller of the model."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch

from hf_cb.core.output import SchedulerOutput, StepResult
from hf_cb.request import Choice, Request, TokenNote
from hf_cb.runtime.beams import Beams
from hf_cb.runtime.graphs import DecodeGraphs
from hf_cb.runtime.input_batch import InputBatch, Wanted, build_input_batch
from hf_cb.runtime.lockstep import Lockstep, Step, lost
from hf_cb.runtime.logprobs import PromptLogprobs
from hf_cb.runtime.port import AttentionPort
from hf_cb.runtime.sampler import RowState, sample

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(input_ids [1, T], position_ids [1, T], logits_indices [n]) -> logits [n, vocab]."""


class ModelRunner:
    """Owns what a step needs besides the schedule: the model, its port, the sampling state of each request."""

    def __init__(
        self,
        forward: Forward,
        port: AttentionPort,
        block_size: int,
        device: torch.device,
        num_groups: int = 1,
        lockstep: Lockstep | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """`num_groups`: of layers, see KVLayout. `lockstep`: with the ranks that share the model; None: it is all here.
        `graphs`: of decode steps, where there may be any."""
        self._forward = forward
        self._port = port
        self._block_size = block_size
        self._device = device
        self._num_groups = num_groups
        self._lockstep = lockstep
        self.graphs = graphs
        self._rows: dict[int, RowState] = {}
        self._beams: dict[int, Beams] = {}
        self._prompts: dict[int, PromptLogprobs] = {}  # of requests that want them and have no token yet
        self.model_seconds = 0.0  # in the latest step

    def add(self, request: Request) -> None:
        """Make ready to sample for `request`."""
        if request.search is not None:
            self._beams[request.request_id] = Beams(request, request.search)
            return
        self._rows[request.request_id] = RowState.of(request, self._device)
        prompt = PromptLogprobs.of(request)
        if prompt is not None:
            self._prompts[request.request_id] = prompt

    def remove(self, request_id: int) -> None:
        """Forget a request; unknown ids are fine."""
        self._rows.pop(request_id, None)
        self._beams.pop(request_id, None)
        self._prompts.pop(request_id, None)

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Compute the step. On an exception nothing has been sampled: the same output may be executed again."""
        with torch.inference_mode():
            wanted = {key: prompt.wanted for key, prompt in self._prompts.items()}
            batch = build_input_batch(output, self._block_size, self._device, wanted, self._num_groups)
            began = time.perf_counter()
            if self._lockstep is not None:
                self._lockstep.send(
                    Step(output, {part.request_id: range(part.first, part.first + part.length) for part in batch.prompt_parts})
                )
            logits = self.forward(batch)
            self.model_seconds = time.perf_counter() - began
            errors = self._note_prompts(batch, logits)
            logits = logits[: len(batch.sampling_ids)]
            result = self._sample(batch.sampling_ids, logits, errors)
            if not self._beams:
                return result
            # Last: nothing can go wrong any more, so that a choice is never made and lost.
            return dataclasses.replace(result, choices=self._choose(output, logits, errors))

    def _sample(self, ids: tuple[int, ...], logits: torch.Tensor, errors: dict[int, BaseException]) -> StepResult:
        """A token for each row of logits [n, vocab] that is not a beam. More errors go to `errors`, which the result holds."""
        if self._beams:
            rest = [i for i, key in enumerate(ids) if key in self._rows]
            ids, logits = tuple(ids[i] for i in rest), logits[rest]
        if not ids:
            return StepResult({}, errors)
        not_numbers = _rows_with_nan(logits)
        sampled = sample(logits, [self._rows[request_id] for request_id in ids])
        errors.update({ids[i]: error for i, error in sampled.errors.items()})
        for i in not_numbers:
            if self._rows[ids[i]].rules is None:  # greedy decoding would take the first NaN for the best token
                errors.setdefault(ids[i], FloatingPointError("its logits hold NaN"))
        tokens = {key: token for key, token in zip(ids, sampled.tokens, strict=True) if key not in errors}
        notes = {ids[i]: TokenNote(note) for i, note in sampled.logprobs.items()}
        for key in self._prompts.keys() & tokens.keys():
            notes[key] = TokenNote(notes.get(key, TokenNote()).logprobs, self._prompts.pop(key).result())
        return StepResult(tokens, errors, frozenset(ids[i] for i in sampled.stopped), notes)

    def _choose(self, output: SchedulerOutput, logits: torch.Tensor, errors: dict[int, BaseException]) -> dict[int, Choice]:
        """Hand logits [n, vocab] of the rows that sample to the searches among them; what those choose that have all."""
        choices: dict[int, Choice] = {}
        sampling = (row for row in output.rows if row.samples)
        taken = [(row, logits[i]) for i, row in enumerate(sampling) if row.request_id in self._beams]
        for row, own in taken:
            self._beams[row.request_id].take(row, own)
        for request_id in {row.request_id for row, _ in taken}:
            try:
                choice = self._beams[request_id].choose()
            except BaseException as error:  # of the caller's own code, which may as well exit
                errors[request_id] = error
                continue
            if choice is not None:
                choices[request_id] = choice
        return choices

    def repeat(self, step: Step) -> None:
        """Compute a step of rank 0 on another rank: keys and values of its heads, its part of every layer."""
        wanted = {key: _these(positions) for key, positions in step.wanted.items()}
        with torch.inference_mode():
            self.forward(build_input_batch(step.output, self._block_size, self._device, wanted, self._num_groups))

    def _note_prompts(self, batch: InputBatch, logits: torch.Tensor) -> dict[int, BaseException]:
        errors: dict[int, BaseException] = {}
        end = len(batch.sampling_ids)
        for key, first, length in batch.prompt_parts:
            end += length
            self._prompts[key].note(first, logits[end - length : end])
        for key in batch.sampling_ids:  # the first token comes: the prompt is through
            if key in self._prompts and not self._prompts[key].is_whole:
                errors[key] = RuntimeError("prompt_logprobs: some positions of the prompt were never computed")
        return errors

    def forward(self, batch: InputBatch) -> torch.Tensor:
        """Logits [n, vocab] of `batch.logits_indices`; writes every row's keys and values."""
        if self.graphs is not None and (logits := self.graphs.run(batch)) is not None:
            return logits
        self._port.begin(batch.steps)
        try:
            return self._forward(batch.input_ids, batch.position_ids, batch.logits_indices)
        except Exception as error:
            if self._lockstep is not None:  # the others are in the middle of the step: it can't be tried again
                raise lost(error) from error
            raise
        finally:
            self._port.end()


def _these(positions: range) -> Wanted:
    return lambda start, end: positions


def _rows_with_nan(logits: torch.Tensor) -> list[int]:
    """Indices of the rows of logits [n, vocab] that hold a NaN: the largest of such a row is NaN."""
    return logits.amax(dim=-1).isnan().nonzero().flatten().tolist()
