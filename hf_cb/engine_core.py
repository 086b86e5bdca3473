"""EngineCore: scheduler, runner and weights of one model in service, and the step that they make together."""

from __future__ import annotations

import contextlib
import enum
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from hf_cb.core.output import Emission, Moves, SchedulerOutput, StepResult
from hf_cb.core.scheduler import Scheduler
from hf_cb.errors import EngineDeadError
from hf_cb.request import FinishReason, Request
from hf_cb.runtime.kv_cache import KVCache
from hf_cb.runtime.lockstep import End, Lockstep, ReleaseKV
from hf_cb.runtime.model_runner import DEVICE_LOST, Launched, ModelRunner, given_up
from hf_cb.runtime.state_pool import StatePool
from hf_cb.runtime.swap_space import SwapSpace
from hf_cb.stats import StepRecord

logger = logging.getLogger("hf_cb")


class Look(enum.Enum):
    """How to find out which weights have been written to."""

    QUICK = enum.auto()  # by torch's counters and the addresses: at every step
    CLOSE = enum.auto()  # by some of their numbers too: for those whose callers may have written to them before
    NONE_NEEDED = enum.auto()  # take all for changed


FollowWeights = Callable[[Look], bool]
"""Brings copies of the weights up to date, and tells whether any was seen to have changed since the last time."""


class Load(NamedTuple):
    """Requests that run and wait, seats that are free, and blocks that are held. A request with beams runs as all of them."""

    running: int
    waiting: int
    seats: int
    blocks_used: int


class Admission(NamedTuple):
    """A request got its seat. `at`: on `time.perf_counter()`'s clock."""

    request_id: int
    num_cached_tokens: int
    at: float


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What came of a step: what each request is to be told, and a record for the books."""

    emissions: list[Emission]
    record: StepRecord
    admitted: tuple[Admission, ...]  # told as soon as they are scheduled


@dataclass(slots=True, eq=False)
class _Flight:
    """A step between its schedule and its result."""

    output: SchedulerOutput
    before: Launched | None  # the step that its UNKNOWN tokens are from
    began: float  # on `time.perf_counter()`'s clock, as the next
    computing: float
    blocks_used: int
    tokens_stored: int
    launched: Launched | None = None  # None: it is computed when its turn comes


@dataclass(slots=True, eq=False)
class EngineCore:
    """What a worker drives, and exchanges as a whole when the model has changed. Owned by the worker's thread."""

    scheduler: Scheduler
    runner: ModelRunner
    cache: KVCache
    swap_space: SwapSpace | None
    follow_weights: FollowWeights
    lockstep: Lockstep | None = None  # with the other ranks of a tensor-parallel model
    overlaps: bool = False  # whether a step is scheduled and launched while the one before it is computed
    states: StatePool | None = None  # of layers that keep some
    _flight: _Flight | None = None
    _idle_since: float = 0.0  # when the result of the latest step came
    _has_new: bool = False  # requests, whose callers may have written to the weights before

    def add(self, request: Request) -> None:
        """Let a request wait for its admission. Raises InvalidArgumentError if it could never be admitted."""
        self.scheduler.add(request)
        self.runner.add(request)
        self._has_new = True

    def step(self, ahead: bool = True) -> StepOutcome:
        """Schedule, compute and take in one step. There is work.

        With `overlaps`, the step after it is launched before this one's result is waited for, unless `ahead` is False or one
        of its rows can't. What fails ends the rows that are to blame, in the emissions; a lost device or a broken invariant
        raises.
        """
        flight, self._flight, begun = self._flight, None, []
        if flight is None:
            flight = self._begin(None)
            if flight is None:
                raise EngineDeadError("nothing can be scheduled although requests wait: the block accounting is broken")
            begun.append(flight)
        if ahead and flight.launched is not None:
            self._flight = self._begin(flight.launched)
            begun += [self._flight] if self._flight else []
        admitted = tuple(Admission(*news, new.began) for new in begun for news in new.output.cached)
        return StepOutcome(*self._take_in(flight), admitted)

    def _begin(self, before: Launched | None) -> _Flight | None:
        """Schedule a step, and launch it if nobody has to wait for it. None: there is nothing to compute before the one that is
        underway has ended."""
        scheduler = self.scheduler
        began = time.perf_counter()
        if self.cache.is_released:
            self.cache.restore()
            if self.states is not None:
                self.states.restore()
        if self.follow_weights(Look.CLOSE if self._has_new else Look.QUICK):
            scheduler.forget_prefixes()
        self._has_new = False
        output = scheduler.schedule()
        self._move_blocks(output.moves)
        if not output.rows:
            return None
        flight = _Flight(
            output,
            before,
            began,
            computing=time.perf_counter(),
            blocks_used=scheduler.memory.blocks_used,
            tokens_stored=scheduler.memory.tokens_stored + output.num_scheduled_tokens * scheduler.memory.num_groups,
        )
        if self.overlaps and self.runner.can_wait(output):
            flight.launched = self._launch(output, before)
        return flight

    def _launch(self, output: SchedulerOutput, before: Launched | None) -> Launched | None:
        try:
            launched = self.runner.launch(output, before)
        except DEVICE_LOST:
            raise
        except Exception as error:  # it is tried again when its turn comes, in parts if need be
            logger.debug("a step could not be launched ahead of its turn", exc_info=error)
            return None
        self.scheduler.advance(output)
        return launched

    def _take_in(self, flight: _Flight) -> tuple[list[Emission], StepRecord]:
        scheduler, output = self.scheduler, flight.output
        if flight.launched is None:
            result = self._execute(scheduler.still_here(output), flight.before)
            scheduler.advance(output)
        else:
            result = self.runner.collect(flight.launched)
        ended = time.perf_counter()
        # What is underway at the same time counts once.
        scheduler.observe(output, ended - max(flight.computing, self._idle_since))
        emissions = scheduler.settle(output, result)
        record = StepRecord(
            started=flight.began,
            seconds=time.perf_counter() - max(flight.began, self._idle_since),
            model_seconds=self.runner.model_seconds,
            rows=tuple((row.request_id, len(row.token_ids)) for row in output.rows),
            sampled=tuple(emission.request_id for emission in emissions for _ in emission.tokens),
            preempted=output.preempted,
            num_waiting=scheduler.num_waiting,
            blocks_used=flight.blocks_used,
            tokens_stored=flight.tokens_stored,
            block_size=self.cache.block_size,
        )
        self._idle_since = ended
        return emissions, record

    def abort(self, request_id: int, reason: FinishReason) -> None:
        """End a request now, and give back all that it holds. Ids that are unknown or have ended are fine."""
        self.scheduler.abort(request_id, reason)
        self.runner.remove(request_id)

    @property
    def max_tokens(self) -> int:
        """The most tokens of prompt and output that the KV cache holds for one request. Any thread may ask, here and below."""
        return self.scheduler.memory.capacity.max_tokens

    @property
    def load(self) -> Load:
        """How many requests run and wait, and what is free."""
        scheduler = self.scheduler
        return Load(scheduler.num_running, scheduler.num_waiting, scheduler.num_seats, scheduler.memory.blocks_used)

    @property
    def num_preemptions(self) -> tuple[int, int]:
        """How often a sequence was preempted, and how often it was swapped out then."""
        return self.scheduler.num_preemptions, self.scheduler.num_swaps

    @property
    def graphs(self) -> tuple[int, str]:
        """How many CUDA graphs there are, and why there are no more."""
        graphs = self.runner.graphs
        return (0, "none were asked for") if graphs is None else (graphs.count, graphs.reason)

    @property
    def has_work(self) -> bool:
        """Whether `step` would give anything."""
        return self._flight is not None or self.scheduler.has_work

    @property
    def is_underway(self) -> bool:
        """Whether a step has been launched and not taken in; `step(ahead=False)` does."""
        return self._flight is not None

    def forget_prefixes(self) -> None:
        """Begin anew with the weights as they are now, for sequences that are running too."""
        self.follow_weights(Look.NONE_NEEDED)
        self.scheduler.forget_prefixes()

    def release_kv(self) -> None:
        """Give the KV memory back until the next step. What runs waits, and computes its keys and values again then."""
        self.scheduler.preempt_all()
        if self.runner.graphs is not None:
            self.runner.graphs.drop()
        self.cache.release()
        if self.states is not None:
            self.states.release()
        if self.lockstep is not None:
            self.lockstep.send(ReleaseKV())

    def end(self, error: str | None = None) -> None:
        """There will be no more steps: let the other ranks go. Calling it again is fine."""
        if self.lockstep is not None and self.lockstep.leads:
            with contextlib.suppress(EngineDeadError):  # they are gone already
                self.lockstep.send(End(error))

    def follow(self) -> None:
        """Compute what rank 0 computes until it ends. Raises EngineDeadError if it ends by a failure, or a rank is lost."""
        assert self.lockstep is not None
        while not isinstance(order := self.lockstep.receive(), End):
            if isinstance(order, ReleaseKV):
                self.cache.release()
                continue
            if self.cache.is_released:
                self.cache.restore()
            self._move_blocks(order.output.moves)
            self.runner.repeat(order)
        if order.error is not None:
            raise EngineDeadError(order.error)

    def _move_blocks(self, moves: Moves) -> None:
        """Copy blocks to and from the host and where beams part. What fails here leaves blocks without their content: the
        engine dies of it."""
        began = time.perf_counter()
        if moves.swap_out:
            self._host().copy_out(moves.swap_out)
        if moves.swap_in:
            self._host().copy_in(moves.swap_in)
        if self.states is not None:
            self.states.copy_out(moves.states_out)
            self.states.copy_in(moves.states_in)
        num_swapped = len(moves.swap_out) + len(moves.swap_in)
        if num_swapped and self._host().waits:
            self.scheduler.swap_cost.observe_swap(num_swapped, time.perf_counter() - began)
        if moves.copies:  # after what was swapped out: a copy may go to one of those blocks
            self.cache.copy(moves.copies)

    def _host(self) -> SwapSpace:
        assert self.swap_space is not None  # or the scheduler would have no host blocks to give
        return self.swap_space

    def _execute(self, output: SchedulerOutput, before: Launched | None) -> StepResult:
        """Compute the rows; where that fails, half of them at a time, until those to blame are found.

        A row's result does not depend on its company, and rows write to blocks of their own only: any part of a step can be
        computed by itself, again too. What fails altogether is given up after a few attempts rather than row by row.
        """
        attempts = 4 * len(output.rows).bit_length()
        results: list[StepResult] = []
        parts = [output] if output.rows else []
        while parts:
            part = parts.pop()
            attempts -= 1
            try:
                result = self.runner.execute(part, before) if before else self.runner.execute(part)
            except DEVICE_LOST:
                raise
            except Exception as error:
                if len(part.rows) > 1 and attempts > 0:
                    parts += _halves(part)
                    continue
                result = given_up(part, error)
            results.append(result)
        return StepResult.of_parts(results)


def _halves(output: SchedulerOutput) -> list[SchedulerOutput]:
    middle = len(output.rows) // 2
    return [SchedulerOutput.of_rows(rows) for rows in (output.rows[middle:], output.rows[:middle])]
