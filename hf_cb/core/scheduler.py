"""Scheduler: composes each step's batch by one rule, without phases.

Every sequence has `num_tokens` and `num_computed_tokens`. A step gives it tokens to catch up, within one token budget for all.
A prompt in chunks, prompts and single tokens in one batch, and resumption after preemption are all cases of that rule. (The
rule is vLLM v1's; iteration-level batching is Orca's, Yu et al., OSDI 2022.)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as Items

from hf_cb.core.block_pool import BlockPool
from hf_cb.core.capacity import Capacity
from hf_cb.core.kv_manager import KVManager
from hf_cb.core.output import UNKNOWN, Emission, SchedulerOutput, StepResult
from hf_cb.core.pacing import Pacer
from hf_cb.core.policy import FCFS, Policy
from hf_cb.core.reach import ALL, Reach
from hf_cb.core.running import Running
from hf_cb.core.sequence import Sequence
from hf_cb.core.step_plan import StepPlan
from hf_cb.core.swap_cost import SwapCost
from hf_cb.errors import EngineDeadError, InvalidArgumentError
from hf_cb.request import Choice, FinishReason, Request, Status

_WATERMARK = 100  # one block in so many stays free at admission, for those that run


class Scheduler:
    """Decides what each step computes, and keeps what came of it.

    The cycle is `schedule()`, the step, `update()`. Nothing counts as computed before `update`: after a step that failed,
    `abort` those to blame and call `schedule` again, which gives everyone else the same tokens again. `add` and `abort` may
    come at any point of the cycle. Not thread-safe, except `check_fits`.

    `update` is `advance()` and `settle()`. Between the two, while a step is underway on its device, the next one may be
    scheduled already: a sequence that samples in the first goes on in the second with a token that is UNKNOWN as yet. If it
    turns out to have ended with that token, what the second step computes for it is ignored: it went to blocks that nobody
    else has before a third step, and counts for nothing.

    `max_batch_tokens`: token budget of a step. `max_batch_size`: the most sequences that run at a time. `num_blocks` x
    `block_size`: the KV cache, in tokens. `policy`: order of service, a fresh one; first come, first served if None.
    `prefix_cache`: whether sequences that begin alike share the blocks of what they have in common. `target_itl`: seconds that
    sequences shall wait for their next token at most while others compute prompts; None: the budget alone counts.
    `num_host_blocks`: blocks of host memory to which preempted sequences are moved where that is cheaper than to compute them
    again, by `swap_cost`. `reaches`: how far back each group of layers looks; a stretch of `block_size` tokens takes a block
    for each group.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_batch_tokens: int,
        max_batch_size: int,
        policy: Policy | None = None,
        prefix_cache: bool = True,
        target_itl: float | None = None,
        num_host_blocks: int = 0,
        swap_cost: SwapCost | None = None,
        reaches: Items[Reach] = (ALL,),
    ) -> None:
        if max_batch_tokens < 1:
            raise InvalidArgumentError(f"max_batch_tokens: takes an integer >= 1; got {max_batch_tokens}")
        self._kv = KVManager(BlockPool(num_blocks), block_size, prefix_cache, num_host_blocks, reaches, max_batch_tokens)
        self.num_preemptions = 0
        self.num_swaps = 0  # how many of those were moved to the host's memory
        self.swap_cost = swap_cost or SwapCost(0.0)
        self._max_batch_tokens = max_batch_tokens
        self._policy: Policy = FCFS() if policy is None else policy
        self._sequences: dict[int, Sequence] = {}  # waiting and running
        self._running = Running(max_batch_size)
        self._capacity = Capacity(self._kv.tables, max_batch_size)
        self._arrivals = itertools.count()
        self._pacer = None if target_itl is None else Pacer(target_itl, block_size)
        self._watermark = num_blocks // _WATERMARK
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

    @property
    def blocks_used(self) -> int:
        """Blocks that sequences hold now."""
        return self._kv.blocks_used

    @property
    def tokens_stored(self) -> int:
        """Tokens whose keys and values are in those blocks, counted once for each group of layers; a step's own count after its
        `update`."""
        return self._kv.tokens_stored

    @property
    def num_groups(self) -> int:
        """Groups of layers."""
        return self._kv.tables.num_groups

    def tokens_of(self, request_id: int) -> tuple[int, ...]:
        """Prompt and output so far of a sequence that has not ended. KeyError for any other."""
        return tuple(token for token in self._sequences[request_id].tokens if token != UNKNOWN)

    @property
    def max_tokens(self) -> int:
        """Of prompt and output of one request."""
        return self._capacity.max_tokens

    def check_fits(self, request: Request) -> None:
        """Raise RequestTooLongError if `request` could not run to its end even alone. Any thread may ask."""
        self._capacity.check(request)

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
        self._kv.forget_prefixes()

    def preempt_all(self) -> None:
        """Take all blocks from those that run, and forget what is in them: the memory is going. They wait, in their order."""
        for seq in reversed(list(self._running)):
            self._preempt(seq)
        self._is_crowded = False  # they had room together
        self._kv.forget_prefixes()

    def schedule(self) -> SchedulerOutput:
        """Compose the next step: running sequences first, then admission. At least one row while `has_work` is true, unless a
        step is underway."""
        plan = StepPlan(self._budget())
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

        Returns an emission for each row that got a token or ended, in the order of the rows. Raises EngineDeadError for a
        result without what it owes, or for an output that is not the latest.
        """
        self.advance(output)
        return self.settle(output, result)

    def still_here(self, output: SchedulerOutput) -> SchedulerOutput:
        """The same without the rows of sequences that have ended since."""
        if all(row.request_id in self._sequences for row in output.rows):
            return output
        rows = tuple(row for row in output.rows if row.request_id in self._sequences)
        return SchedulerOutput(rows, sum(len(row.token_ids) for row in rows))

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
            seq.num_computed_tokens += len(row.token_ids)
            if row.samples and seq.request.search is None:
                seq.tokens.append(UNKNOWN)

    def settle(self, output: SchedulerOutput, result: StepResult) -> list[Emission]:
        """Take in the result of the oldest step that was advanced. See `update`."""
        self._num_underway -= 1
        emissions = []
        for row in output.rows:
            head = self._sequences.get(row.request_id)
            if head is None:  # aborted since
                continue
            error = result.errors.get(row.request_id) if result.errors else None
            if error is not None:
                self._end(head, FinishReason.FAILED)
                emissions.append(Emission(row.request_id, None, FinishReason.FAILED, error))
                continue
            seq = head.beams[row.beam] if head.beams else head
            end = row.start + len(row.token_ids)
            if head.status is Status.RUNNING:  # else it was preempted meanwhile, and only its token is new
                self._kv.publish(seq, end)
                self._kv.shed(seq, end)
            if seq.tails and end == len(seq.tokens):
                tails, seq.tails = seq.tails, ()
                self._branch(seq, [(seq, tail) for tail in tails])
            elif row.samples and seq.request.search is None:
                emissions.append(self._know(seq, end, result))
        for request_id, choice in result.choices.items():
            head = self._sequences.get(request_id)
            if head is not None:
                emissions += self._choose(head, choice)
        return emissions

    def check(self) -> None:
        """Raise EngineDeadError unless every sequence is waiting or running and blocks are held by running ones only."""
        self._kv.check()
        running = [seq for seq in self._sequences.values() if seq.status is Status.RUNNING]
        waiting = [seq for seq in self._sequences.values() if seq.status is Status.WAITING]
        if len(running) + len(waiting) != len(self._sequences) or len(waiting) != len(self._policy):
            raise EngineDeadError("scheduler: a sequence is neither waiting nor running")
        self._running.check(running)
        if any(seq.block_table or seq.num_computed_tokens or seq.beams for seq in waiting):
            raise EngineDeadError("scheduler: a waiting sequence holds blocks")
        if self._kv.blocks_used and not running:
            raise EngineDeadError("scheduler: nothing runs, yet blocks are held")

    def _budget(self) -> int:
        """Tokens of the next step."""
        if self._pacer is None:
            return self._max_batch_tokens
        singles = sum(map(_lacks_one_token, self._running.members()))
        if not singles:
            return self._max_batch_tokens
        return min(self._max_batch_tokens, singles + self._pacer.allowance())

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
            copies = self._reserve_or_preempt(seq, end, plan)
            if copies is not None:
                plan.grant(seq, end, copies)

    def _reserve_or_preempt(self, seq: Sequence, end: int, plan: StepPlan) -> tuple[tuple[int, int], ...] | None:
        """Blocks for `seq` up to position `end`, at the cost of the less deserving, and which of them are to be copied first.
        None: it is itself the least deserving."""
        while (copies := self._kv.reserve(seq, end)) is None:
            victim = self._policy.victim(self._running)
            if victim.request_id == seq.request_id and self._num_underway:
                # The step underway may give blocks back, its own too: those that it sees no more. Preempted, it would come to
                # the same point again and again where the pool has but what one sequence needs.
                plan.is_short = True
                return None
            plan.revoke(victim)
            plan.swap_out += self._preempt(victim, may_move=True)
            if victim.request_id == seq.request_id:
                return None
        return copies

    def _admit(self, plan: StepPlan) -> None:
        while plan.left > 0:
            seq = self._policy.next_waiting()
            if seq is None or not self._running.has_seats_for(seq):
                return
            sibling = self._running.get(seq.request.fork_of)
            start = None if seq.host_blocks else self._kv.find_start(seq, sibling)
            if start is None and not seq.host_blocks:
                return  # what it needs next is being computed: wait for that rather than compute it twice
            # Blocks for all its tokens, not just for the first chunk: one that starts what it can't end only wastes work.
            if not self._kv.can_reserve(seq, seq.num_tokens, start, self._headroom() + self._kv.num_for_beams(seq)):
                return
            if start is None:
                plan.swap_in += self._kv.move_in(seq)
            else:
                self._kv.adopt(seq, start)
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = seq.num_computed_tokens
                self._policy.charge(seq, seq.num_tokens - seq.num_cached_tokens, 0)
                plan.cached.append((seq.request_id, seq.num_cached_tokens))
            end = min(seq.num_tokens, seq.num_computed_tokens + plan.left)
            copies = self._kv.reserve(seq, end)
            assert copies is not None  # can_reserve said so, for more
            self._policy.remove(seq)
            seq.status = Status.RUNNING
            self._running.join(seq)
            plan.grant(seq, end, copies)

    def _headroom(self) -> int:
        """Blocks to leave free for those that run, so that who is admitted is not preempted, or preempts, right away."""
        if not self._running:
            return 0
        if not self._is_crowded:
            return self._watermark
        return max(self._watermark, self.num_running * self._kv.tables.num_groups)

    def _preempt(self, seq: Sequence, may_move: bool = False) -> tuple[tuple[int, int], ...]:
        """Take `seq`'s blocks. It keeps its tokens; when it is resumed, it computes their keys and values again, or has them
        copied back from the host. Returns what is to be copied there first."""
        num_host_blocks = self._kv.num_host_blocks_for(seq) if may_move and not seq.beams else None
        pairs: tuple[tuple[int, int], ...] = ()
        if num_host_blocks is not None and self.swap_cost.is_cheaper(seq.num_computed_tokens, num_host_blocks):
            pairs = self._kv.move_out(seq)
            self.num_swaps += 1
        else:
            self._release(seq)
        if seq.beams:
            seq.fold()
        self._running.leave(seq)
        seq.status = Status.WAITING
        self._policy.put_back(seq)
        self._is_crowded = True
        self.num_preemptions += 1
        return pairs

    def _know(self, seq: Sequence, position: int, result: StepResult) -> Emission:
        """The token at `position` is known now."""
        token = result.tokens.get(seq.request_id)
        if token is None:
            raise EngineDeadError(f"request {seq.request_id}: the step gave neither a token nor an error")
        if seq.tokens[position] != UNKNOWN:
            raise EngineDeadError(f"request {seq.request_id}: the result is not that of the oldest step")
        seq.tokens[position] = token
        self._policy.charge(seq, 0, 1)
        reason = None
        if token in seq.request.eos_token_ids or seq.request_id in result.stopped:
            reason = FinishReason.STOP
        elif position + 1 == seq.request.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end(seq, reason)
        return Emission(seq.request_id, token, reason, note=result.notes.get(seq.request_id))

    def _choose(self, head: Sequence, choice: Choice) -> list[Emission]:
        """Let the beams of a search go on as it has chosen, or end it."""
        self._policy.charge(head, 0, head.request.width)
        if choice.best is None:
            # After the prompt there is the trunk alone, whichever of the beams that begin there is meant.
            parents = [head.beams[parent] if head.beams else head for parent in choice.parents]
            self._branch(head, [(parent, (token,)) for parent, token in zip(parents, choice.tokens, strict=True)])
            return []
        ended = choice.best[-1:] and choice.best[-1] in head.request.eos_token_ids
        is_full = len(choice.best) == head.request.max_new_tokens and not ended
        reason = FinishReason.LENGTH if is_full else FinishReason.STOP
        self._end(head, reason)
        return [Emission(head.request_id, None, reason, best=choice.best)]

    def _branch(self, head: Sequence, tails: list[tuple[Sequence, tuple[int, ...]]]) -> None:
        """Make new beams of a request that is running: each goes on from a present one with tokens of its own."""
        branches = [(parent, parent.branch(i, tail)) for i, (parent, tail) in enumerate(tails)]
        self._kv.branch(head.members, branches)
        head.beams = tuple(branch for _, branch in branches)

    def _release(self, seq: Sequence) -> None:
        for member in seq.members:
            self._kv.release(member)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.status is Status.RUNNING:
            self._running.leave(seq)
        else:
            self._policy.remove(seq)
        self._release(seq)
        self._is_crowded = False
        del self._sequences[seq.request_id]
        seq.status = Status.FINISHED
        seq.finish_reason = reason


def _lacks_one_token(seq: Sequence) -> bool:
    return seq.lacks == 1
