"""ModelRunner: executes a scheduled step. The only caller of the model."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hf_cb.core.output import SchedulerOutput, StepResult
from hf_cb.errors import EngineDeadError
from hf_cb.request import Choice, Request, TokenNote
from hf_cb.runtime.beams import Beams
from hf_cb.runtime.graphs import DecodeGraphs
from hf_cb.runtime.input_batch import DraftPart, InputBatch, Wanted, build_input_batch
from hf_cb.runtime.lockstep import Lockstep, Step, lost
from hf_cb.runtime.logprobs import PromptLogprobs
from hf_cb.runtime.port import AttentionPort
from hf_cb.runtime.sampler import Chosen, RowState, Sampled, accept, choose, sample
from hf_cb.runtime.state_pool import StateGroup
from hf_cb.runtime.streams import Download, Streams, streams_of

logger = logging.getLogger("hf_cb")

DEVICE_LOST: tuple[type[BaseException], ...] = (getattr(torch, "AcceleratorError", EngineDeadError), EngineDeadError)
"""Errors that leave the device unusable: nothing can be tried again (torch names it from 2.8 on)."""

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(input_ids [1, T], position_ids [1, T], logits_indices [n]) -> logits [n, vocab]."""


class Mixing(Protocol):
    """What stands in the place of a twin's layers that keep a state."""

    def begin(self, groups: tuple[StateGroup, ...], num_tokens: int) -> None:
        """Their next calls are of a step of so many packed tokens, whose rows read and write these states."""

    def end(self) -> None:
        """The step is over."""


@dataclass(slots=True, eq=False)
class Launched:
    """A step that has gone to the device, whole."""

    output: SchedulerOutput
    batch: InputBatch
    logits: torch.Tensor  # [n, vocab], of what `batch.logits_indices` names
    ids: tuple[int, ...]  # requests for which `chosen` has a token each
    rows: list[RowState]  # theirs: a request may end before its step does
    chosen: Chosen | None  # None: there are none
    arriving: Download  # the chosen's tokens [n], and whether there is a NaN in each row's scores [n]
    errors: dict[int, BaseException]  # request id -> what is known already
    seconds: float  # that the model took of the host's time


@dataclass(slots=True)
class _Found:
    """What a step's logits have come to so far."""

    rows: dict[int, RowState]
    errors: dict[int, BaseException]
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    notes: dict[int, list[TokenNote]] = field(default_factory=dict)

    def take(self, ids: tuple[int, ...], sampled: Sampled) -> None:
        """One more token, or an error, for each of `ids`."""
        for i, error in sampled.errors.items():
            self.errors.setdefault(ids[i], error)
        for i, key in enumerate(ids):
            if key in self.errors:
                self.tokens.pop(key, None)
            else:
                self.tokens[key] = (*self.tokens.get(key, ()), sampled.tokens[i])
        self.stopped.update(ids[i] for i in sampled.stopped)
        for i, logprobs in sampled.logprobs.items():
            self.notes.setdefault(ids[i], []).append(TokenNote(logprobs))

    def goes_on(self, part: DraftPart, depth: int) -> bool:
        """Whether a draft's token at `depth` is the one that was sampled there, and the row has not ended with it."""
        key, tokens = part.request_id, self.tokens.get(part.request_id, ())
        is_right = depth < len(part.tokens) and len(tokens) == depth + 1 and tokens[-1] == part.tokens[depth]
        return is_right and key not in self.stopped and tokens[-1] not in self.rows[key].eos_token_ids

    def result(self) -> StepResult:
        """Everything that was found, as the result of the step."""
        notes = {key: tuple(notes) for key, notes in self.notes.items() if key in self.tokens}
        return StepResult(self.tokens, self.errors, frozenset(self.stopped), notes)


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
        streams: Streams | None = None,
        graphs: DecodeGraphs | None = None,
        mixing: Mixing | None = None,
    ) -> None:
        """`num_groups`: of layers, see KVLayout. `lockstep`: with the ranks that share the model; None: it is all here.
        `streams`: of the device. `graphs`: of decode steps, where there may be any. `mixing`: of layers that keep states."""
        self._forward = forward
        self._port = port
        self._block_size = block_size
        self._device = device
        self._streams = streams or streams_of(device)
        self._num_groups = num_groups
        self._lockstep = lockstep
        self.graphs = graphs
        self._mixing = mixing
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
        if request.prompt_logprobs is not None:
            self._prompts[request.request_id] = PromptLogprobs(request.prompt, request.prompt_logprobs)

    def remove(self, request_id: int) -> None:
        """Forget a request; unknown ids are fine."""
        row = self._rows.pop(request_id, None)
        if row is not None and row.rules is not None:
            row.rules.close()
        self._beams.pop(request_id, None)
        self._prompts.pop(request_id, None)

    def can_wait(self, output: SchedulerOutput) -> bool:
        """Whether the next step can be launched before the result of this one has come: no row's next token takes the host to
        know this one, and it is known where that token comes."""
        asking = [self._rows.get(row.request_id) for row in output.rows if row.num_logits]
        return not (
            any(row is None or row.needs_host for row in asking)
            or any(row.num_logits > 1 for row in output.rows)
            or any(row.request_id in self._prompts for row in output.rows)
        )

    def execute(self, output: SchedulerOutput, before: Launched | None = None) -> StepResult:
        """Compute the step. After an exception the same output may be executed again, in parts too."""
        return self.collect(self.launch(output, before))

    def launch(self, output: SchedulerOutput, before: Launched | None = None) -> Launched:
        """Hand the step to the device; if it `can_wait`, without waiting for that.

        `before`: the step before, where this one has tokens of it that are UNKNOWN. After an exception it may be tried again,
        in parts too.
        """
        self._rewind(output)
        with torch.inference_mode():
            wanted = {key: prompt.wanted for key, prompt in self._prompts.items()}
            ids = () if before is None else before.ids
            batch = build_input_batch(output, self._block_size, self._streams, wanted, self._num_groups, ids)
            if before is not None and before.chosen is not None:
                batch.follow(before.chosen.tokens)
            began = time.perf_counter()
            if self._lockstep is not None:
                self._lockstep.send(
                    Step(output, {part.request_id: range(part.first, part.first + part.length) for part in batch.prompt_parts})
                )
            logits = self.forward(batch)
            return self._choose_tokens(output, batch, logits, time.perf_counter() - began)

    def _rewind(self, output: SchedulerOutput) -> None:
        """Put what the runner keeps of the rows back to where they stood before this step, whatever an earlier attempt at it
        has moved: a step, or a part of one, is only ever computed from there.

        Keys and values are written to the same places again. What can't be put back, a draw or an answer of the caller's own
        rules, is not asked for again: such a row has its error then.
        """
        for row in output.rows:
            state = self._rows.get(row.request_id)
            if state is not None and row.num_logits:
                state.num_sampled = row.end - state.num_prompt_tokens

    def _choose_tokens(self, output: SchedulerOutput, batch: InputBatch, logits: torch.Tensor, seconds: float) -> Launched:
        """Let the device choose a token for each row that samples and is not a beam. Last: what may fail should fail before,
        since a draw that is made is gone."""
        errors = self._note_prompts(batch, logits)
        ids, own = batch.sampling_ids, logits[: len(batch.sampling_ids)]
        if self._beams:
            rest = [i for i, key in enumerate(ids) if key in self._rows]
            ids, own = tuple(ids[i] for i in rest), own[rest]
        rows = [self._rows[request_id] for request_id in ids]
        chosen = choose(own, rows) if ids else None
        arriving = self._streams.download(*((chosen.tokens, chosen.has_nan) if chosen else ()))
        return Launched(output, batch, logits, ids, rows, chosen, arriving, errors, seconds)

    def collect(self, launched: Launched) -> StepResult:
        """What came of a step. Waits for it. Raises for a lost device alone. What else fails ends the rows: by now a step can't
        be computed again."""
        try:
            return self._collect(launched)
        except DEVICE_LOST:
            raise
        except Exception as error:
            return given_up(launched.output, error)

    def _collect(self, launched: Launched) -> StepResult:
        with torch.inference_mode():
            began = time.perf_counter()
            arrived = launched.arriving()
            self.model_seconds = launched.seconds + time.perf_counter() - began
            result = self._accept(launched, arrived, launched.errors)
            if not self._beams:
                return result
            # Last: nothing can go wrong any more, so that a choice is never made and lost.
            choices = self._choose(launched.output, launched.logits[: len(launched.batch.sampling_ids)], launched.errors)
            return dataclasses.replace(result, choices=choices)

    def _accept(self, launched: Launched, arrived: tuple[torch.Tensor, ...], errors: dict[int, BaseException]) -> StepResult:
        """The result of the rows that are no beams. More errors go to `errors`, which it holds."""
        ids = launched.ids
        if launched.chosen is None:
            return StepResult({}, errors)
        sampled = accept(launched.chosen, launched.rows, *(tensor.tolist() for tensor in arrived))
        found = _Found(dict(zip(ids, launched.rows, strict=True)), errors)
        found.take(ids, sampled)
        self._verify(launched, found)
        for key in self._prompts.keys() & found.tokens.keys():
            first, *rest = found.notes.get(key) or [TokenNote() for _ in found.tokens[key]]
            found.notes[key] = [TokenNote(first.logprobs, self._prompts.pop(key).result()), *rest]
        return found.result()

    def _verify(self, launched: Launched, found: _Found) -> None:
        """Sample on where drafts were right: each position by the tokens before it, as if it had been computed by itself."""
        depth, parts = 0, list(launched.batch.draft_parts)
        while parts := [part for part in parts if found.goes_on(part, depth)]:
            ids = tuple(part.request_id for part in parts)
            logits = launched.logits[[part.first + depth for part in parts]]
            found.take(ids, sample(logits, [found.rows[key] for key in ids]))
            depth += 1

    def _choose(self, output: SchedulerOutput, logits: torch.Tensor, errors: dict[int, BaseException]) -> dict[int, Choice]:
        """Hand logits [n, vocab] of the rows that ask for them to the searches among them; what those choose that have all."""
        choices: dict[int, Choice] = {}
        asking = (row for row in output.rows if row.num_logits)
        taken = [(row, logits[i]) for i, row in enumerate(asking) if row.request_id in self._beams]
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
            self.forward(build_input_batch(step.output, self._block_size, self._streams, wanted, self._num_groups))

    def _note_prompts(self, batch: InputBatch, logits: torch.Tensor) -> dict[int, BaseException]:
        errors: dict[int, BaseException] = {}
        end = len(batch.sampling_ids) + sum(len(part.tokens) for part in batch.draft_parts)
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
        indices = batch.logits_indices
        self._port.begin(batch.steps, indices if len(indices) < batch.input_ids.shape[1] else None)
        if self._mixing is not None:
            self._mixing.begin(batch.states, batch.input_ids.shape[1])
        try:
            return self._forward(batch.input_ids, batch.position_ids, batch.logits_indices)
        except Exception as error:
            if self._lockstep is not None:  # the others are in the middle of the step: it can't be tried again
                raise lost(error) from error
            raise
        finally:
            self._port.end()
            if self._mixing is not None:
                self._mixing.end()


def given_up(output: SchedulerOutput, error: Exception) -> StepResult:
    """The result of a step that failed for good: all of its rows end with the error."""
    ids = [row.request_id for row in output.rows]
    said = "a step of %d sequences failed; they end, the engine goes on"
    logger.error(said, len(ids), exc_info=error, extra={"engine_request_ids": ids})
    return StepResult({}, dict.fromkeys(ids, error))


def _these(positions: range) -> Wanted:
    return lambda start, end: positions
