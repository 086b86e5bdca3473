"""Scheduler: composes each step's batch by one rule, without phases.

Every sequence has `num_tokens` and `num_computed_tokens`. A step gives it tokens to catch up, within one token budget for all.
A prompt in chunks, prompts and single tokens in one batch, and resumption after preemption are all cases of that rule. (The
rule is vLLM v1's; iteration-level batching is Orca's, Yu et al., OSDI 2022.)
"""

from __future__ import annotations

import itertools
import time

from hf_cb.core.kv_manager import KVManager
from hf_cb.core.output import NO_MOVES, UNKNOWN, Emission, Moves, ScheduledRow, SchedulerOutput, StepResult
from hf_cb.core.pacing import Pacer
from hf_cb.core.policy import FCFS, Policy
from hf_cb.core.running import Running
from hf_cb.core.sequence import Sequence
from hf_cb.core.step_plan import Draft, StepPlan
from hf_cb.core.swap_cost import SwapCost
from hf_cb.errors import EngineDeadError, InvalidArgumentError, RequestTooLongError
from hf_cb.request import Choice, FinishReason, Request, Status


class Scheduler:
    """Decides what each step computes, and keeps what came of it.

    The cycle is `schedule()`, the step, `update()`. Nothing counts as computed before `update`: after a step that failed,
    `abort` those to blame and call `schedule` again. `add` and `abort` may come at any point. Not thread-safe, except
    `check_fits`.

    `update` is `advance()` and `settle()`. Between the two, while a step is underway on its device, the next one may be
    scheduled already: a sequence that samples in the first goes on in the second with a token that is UNKNOWN as yet. If it
    turns out to have ended with that token, what the second step computes for it is ignored: it went to blocks that nobody
    else has before a third step, and counts for nothing.

    `memory`: of the sequences, its own from now on. `max_batch_tokens`: token budget of a step. `max_batch_size`: the most
    sequences that run at a time. `policy`: order of service, a fresh one; first come, first served if None. `pacer`: keeps the
    time between two tokens short while others compute prompts; None: the budget alone counts. `swap_cost`: says when a
    preempted sequence is moved to the host rather than computed again. `draft`: guesses what comes after a sequence's last
    token, at most so many tokens; the step that computes them tells how many are right.
    """

    def __init__(
        self,
        memory: KVManager,
        *,
        max_batch_tokens: int,
        max_batch_size: int,
        policy: Policy | None = None,
        pacer: Pacer | None = None,
        swap_cost: SwapCost | None = None,
        draft: Draft | None = None,
    ) -> None:
        if max_batch_tokens < 1:
            raise InvalidArgumentError(f"max_batch_tokens: takes an integer >= 1; got {max_batch_tokens}")
        self.memory = memory
        self.num_preemptions = 0
        self.num_swaps = 0  # how many of those were moved to the host's memory
        self.swap_cost = swap_cost or SwapCost(0.0)
        self._max_batch_tokens = max_batch_tokens
        self._policy: Policy = FCFS() if policy is None else policy
        self._sequences: dict[int, Sequence] = {}  # waiting and running
        self._running = Running(max_batch_size)
        self._arrivals = itertools.count()
        self._pacer = pacer
        self._draft = draft
        self._is_crowded = False  # somebody was preempted, and nobody has ended since
        self._num_underway = 0  # steps that were advanced and not settled

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks and get tokens; a request with beams counts as all of them."""
        return self._running.num_taken

    @property
    def num_waiting(self) -> int:
        """Requests that were not admitted yet, or were preempted."""
        return len(self._policy)

    @property
    def num_seats(self) -> int:
        """How many more may run. (Who waits may be about to be admitted, so that says nothing.)"""
        return self._running.num_seats - self._running.num_taken

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would give anything to compute."""
        return bool(self._sequences)

    def check_fits(self, request: Request) -> None:
        """Raise RequestTooLongError if `request` could not run to its end even alone. Any thread may ask."""
        if request.width > self._running.num_seats:
            raise RequestTooLongError(
                f"num_beams: {request.width} beams run together, and max_batch_size is {self._running.num_seats}"
            )
        self.memory.capacity.check(request)

    def add(self, request: Request) -> None:
        """Let `request` wait for admission. Raises what `check_fits` raises, and InvalidArgumentError for a known id."""
        self.check_fits(request)
        if request.request_id in self._sequences:
            raise InvalidArgumentError(f"request: takes one that is not here yet; got {request.request_id} again")
        seq = Sequence(request, next(self._arrivals), time.monotonic())
        self._policy.enqueue(seq)  # first: it may be the user's own, and raise
        self._sequences[request.request_id] = seq

    def abort(self, request_id: int, reason: FinishReason) -> bool:
        """End a sequence now, whatever it is doing, and free its blocks. False if it is not here, or not any more.

        Between `schedule` and `update` too: what the step computes for it is then ignored.
        """
        seq = self._sequences.get(request_id)
        if seq is None:
            return False
        self._end(seq, reason)
        return True

    def forget_prefixes(self) -> None:
        """Let no sequence begin with what was computed up to now: the model has changed. Those that run go on as they are."""
        self.memory.forget_prefixes()

    def preempt_all(self) -> None:
        """Take all blocks from those that run, and forget what is in them: the memory is going. They wait, in their order."""
        for seq in reversed(list(self._running)):
            self._preempt(seq)
        self._is_crowded = False  # they had room together
        self.memory.forget_prefixes()

    def schedule(self) -> SchedulerOutput:
        """Compose the next step: running sequences first, then admission. At least one row while `has_work` is true, unless a
        step is underway."""
        plan = StepPlan(self._budget(), self.memory, self._draft)
        self._serve_running(plan)
        if not plan.preempted and not plan.is_short:  # else who is admitted now would be the next to be preempted
            self._admit(plan)
        return plan.output()

    def observe(self, output: SchedulerOutput, seconds: float) -> None:
        """Learn how long the step of `output` took."""
        if output.num_scheduled_tokens > len(output.rows):
            self.swap_cost.observe_step(output.num_scheduled_tokens, seconds)
        if self._pacer is not None:
            singles = sum(len(row.token_ids) == 1 for row in output.rows)
            self._pacer.observe(singles, output.num_scheduled_tokens - singles, seconds)

    def update(self, output: SchedulerOutput, result: StepResult) -> list[Emission]:
        """Take in what the step of the latest `schedule` computed: append tokens, end what is done, free its blocks.

        Returns an emission for each row that got a token or ended, in their order. Raises EngineDeadError for a result
        without what it owes, or for an output that is not the latest."""
        self.advance(output)
        return self.settle(output, result)

    def still_here(self, output: SchedulerOutput) -> SchedulerOutput:
        """The same without the rows of sequences that have ended since."""
        rows = tuple(row for row in output.rows if row.request_id in self._sequences)
        return output if len(rows) == len(output.rows) else SchedulerOutput.of_rows(rows)

    def advance(self, output: SchedulerOutput) -> None:
        """Count the step of the latest `schedule` as computed: it is underway, and what follows comes after it."""
        self._num_underway += 1
        for row in output.rows:
            head = self._sequences.get(row.request_id)
            if head is None:  # aborted since
                continue
            seq = head.beams[row.beam] if head.beams else head
            if seq.num_computed_tokens != row.start or head.status is not Status.RUNNING:
                raise EngineDeadError(f"request {row.request_id}: the result is not that of the latest step")
            seq.num_computed_tokens = row.end
            self.memory.advance(seq)
            if row.num_logits and seq.request.search is None:
                seq.tokens.append(UNKNOWN)

    def settle(self, output: SchedulerOutput, result: StepResult) -> list[Emission]:
        """Take in the result of the oldest step that was advanced. See `update`."""
        self._num_underway -= 1
        emissions: list[Emission] = []
        for row in output.rows:
            head = self._sequences.get(row.request_id)  # None: it was aborted since
            if head is not None and (emission := self._settle_row(head, row, result)) is not None:
                emissions.append(emission)
        for request_id, choice in result.choices.items():
            if (head := self._sequences.get(request_id)) is not None:
                emissions += self._choose(head, choice)
        return emissions

    def _settle_row(self, head: Sequence, row: ScheduledRow, result: StepResult) -> Emission | None:
        error = result.errors.get(row.request_id) if result.errors else None
        if error is not None:
            self._end(head, FinishReason.FAILED)
            return Emission(row.request_id, (), FinishReason.FAILED, error)
        seq = head.beams[row.beam] if head.beams else head
        end = row.end
        tokens: tuple[int, ...] = ()
        if row.num_logits and seq.request.search is None:
            tokens = seq.learn(end, result.tokens.get(row.request_id))
        if len(tokens) > 1:  # drafts that were right
            end += len(tokens) - 1
            if head.status is Status.RUNNING:
                seq.num_computed_tokens = end
        if head.status is Status.RUNNING:  # else it was preempted meanwhile, and only its tokens are new
            self.memory.commit(seq, end)
        if tokens:
            return self._emit(seq, tokens, end, result)
        if seq.tails and end == len(seq.tokens):
            tails, seq.tails = seq.tails, ()
            self._branch(seq, [(seq, tail) for tail in tails])
        return None

    def check(self) -> None:
        """Raise EngineDeadError unless every sequence is waiting or running and blocks are held by running ones only."""
        self.memory.check()
        running = [seq for seq in self._sequences.values() if seq.status is Status.RUNNING]
        waiting = [seq for seq in self._sequences.values() if seq.status is Status.WAITING]
        if len(running) + len(self._policy) != len(self._sequences) or len(waiting) != len(self._policy):
            raise EngineDeadError("scheduler: a sequence is neither waiting nor running")
        self._running.check(running)
        if any(seq.held.block_table or seq.num_computed_tokens or seq.beams for seq in waiting):
            raise EngineDeadError("scheduler: a waiting sequence holds blocks")
        if self.memory.blocks_used and not running:
            raise EngineDeadError("scheduler: nothing runs, yet blocks are held")

    def _budget(self) -> int:
        """Tokens of the next step."""
        singles = 0 if self._pacer is None else sum(map(_lacks_one_token, self._running.members()))
        paced = singles + self._pacer.allowance() if self._pacer is not None and singles else self._max_batch_tokens
        return min(self._max_batch_tokens, paced)

    def _serve_running(self, plan: StepPlan) -> None:
        running = self._running.members()
        if self._pacer is not None:  # a prompt must not take what the budget has for the next token of the others
            running.sort(key=_lacks_one_token, reverse=True)
        for seq in running:
            if plan.left == 0:
                return
            if seq not in self._running:  # preempted for one before it
                continue
            end = min(seq.num_tokens, seq.num_computed_tokens + plan.left)
            if end == seq.num_computed_tokens or seq.is_full:  # a beam that waits for the others, or one that is about to end
                continue
            if self._reserve_or_preempt(seq, end, plan):
                plan.grant(seq, end)

    def _reserve_or_preempt(self, seq: Sequence, end: int, plan: StepPlan) -> bool:
        """Make room for `seq` up to position `end`, at the cost of the less deserving. False: it is itself the least
        deserving."""
        while (moves := self.memory.reserve(seq, end)) is None:
            victim = self._policy.victim(self._running)
            if victim.request_id == seq.request_id and self._num_underway:
                # The step underway may give blocks back, its own too: those that it sees no more. Preempted, it would come to
                # the same point again and again where the pool has but what one sequence needs.
                plan.is_short = True
                return False
            plan.revoke(victim)
            plan.move(self._preempt(victim, may_move=True))
            if victim.request_id == seq.request_id:
                return False
        plan.move(moves)
        return True

    def _admit(self, plan: StepPlan) -> None:
        while plan.left > 0:
            seq = self._policy.next_waiting()
            if seq is None or not self._running.has_seats_for(seq):
                return
            is_moved = bool(seq.held.host_blocks)
            start = None if is_moved else self.memory.find_start(seq, self._running.get(seq.request.fork_of))
            if start is None and not is_moved:
                return  # what it needs next is being computed: wait for that rather than compute it twice
            if not self.memory.can_admit(seq, start, self.num_running, self._is_crowded):
                return
            plan.move(self.memory.admit(seq, start))
            self._policy.remove(seq)
            seq.status = Status.RUNNING
            self._running.join(seq)
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = seq.num_computed_tokens
                self._policy.charge(seq, seq.num_tokens - seq.num_cached_tokens, 0)
                plan.cached.append((seq.request_id, seq.num_cached_tokens))
            end = min(seq.num_tokens, seq.num_computed_tokens + plan.left)
            moves = self.memory.reserve(seq, end)
            assert moves is not None  # can_admit said so, for more
            plan.move(moves)
            plan.grant(seq, end)

    def _preempt(self, seq: Sequence, may_move: bool = False) -> Moves:
        """Take what `seq` holds. When it is resumed, it computes its keys and values again, or has them copied back from the
        host. Returns what is to be copied there first."""
        cost = self.memory.cost_of_move(seq) if may_move and not seq.beams else None
        is_moved = cost is not None and self.swap_cost.is_cheaper(seq.num_computed_tokens, cost)
        moves = self.memory.move_out(seq) if is_moved else NO_MOVES
        self.num_swaps += is_moved
        if not is_moved:
            self._release(seq)
        if seq.beams:
            seq.fold()
        self._running.leave(seq)
        seq.status = Status.WAITING
        self._policy.put_back(seq)
        self._is_crowded = True
        self.num_preemptions += 1
        return moves

    def _emit(self, seq: Sequence, tokens: tuple[int, ...], end: int, result: StepResult) -> Emission:
        """Report the tokens, the last of which is at position `end`, and end the sequence if that does."""
        key, reason = seq.request.request_id, seq.request.ends_with(tokens[-1], end + 1)
        if key in result.stopped and len(tokens) == len(result.tokens[key]):
            reason = FinishReason.STOP
        self._policy.charge(seq, 0, len(tokens))
        if reason is not None:
            self._end(seq, reason)
        return Emission(key, tokens, reason, None, result.notes[key][: len(tokens)] if key in result.notes else ())

    def _choose(self, head: Sequence, choice: Choice) -> list[Emission]:
        """Let the beams of a search go on as it has chosen, or end it."""
        self._policy.charge(head, 0, head.request.width)
        if choice.best is None:
            # After the prompt there is the trunk alone, whichever of the beams that begin there is meant.
            parents = [head.beams[parent] if head.beams else head for parent in choice.parents]
            self._branch(head, [(parent, (token,)) for parent, token in zip(parents, choice.tokens, strict=True)])
            return []
        num_tokens = len(head.request.prompt) + len(choice.best)
        reason = head.request.ends_with(choice.best[-1] if choice.best else None, num_tokens) or FinishReason.STOP
        self._end(head, reason)
        return [Emission(head.request_id, (), reason, best=choice.best)]

    def _branch(self, head: Sequence, tails: list[tuple[Sequence, tuple[int, ...]]]) -> None:
        """Make new beams of a request that is running: each goes on from a present one with tokens of its own."""
        branches = [(parent, parent.branch(i, tail)) for i, (parent, tail) in enumerate(tails)]
        self.memory.branch(head.members, branches)
        head.beams = tuple(branch for _, branch in branches)

    def _release(self, seq: Sequence) -> None:
        for member in seq.members:
            self.memory.release(member)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.status is Status.RUNNING:
            self._running.leave(seq)
        else:
            self._policy.remove(seq)
        self._release(seq)
        self._is_crowded = False
        del self._sequences[seq.request_id]
        seq.status = Status.FINISHED


def _lacks_one_token(seq: Sequence) -> bool:
    return seq.lacks == 1
