"""StepPlan: a step while the scheduler composes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hf_cb.core.kv_manager import KVManager
from hf_cb.core.output import NO_MOVES, Moves, ScheduledRow, SchedulerOutput
from hf_cb.core.sequence import Sequence

Draft = Callable[[Sequence, int], tuple[int, ...]]
"""(sequence, most tokens) -> guesses at what comes next; none is fine."""


@dataclass(slots=True)
class StepPlan:
    """A step while it is composed. `budget`: tokens that it may have in all. `draft`: see Scheduler."""

    budget: int
    memory: KVManager
    draft: Draft | None = None
    granted: int = 0  # of those
    rows: dict[Sequence, ScheduledRow] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)
    cached: list[tuple[int, int]] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)  # copy -> block: one that is handed out anew is copied to once
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    states_out: list[tuple[int, int]] = field(default_factory=list)
    states_in: list[tuple[int, int]] = field(default_factory=list)
    is_short: bool = False  # of blocks for somebody who waits for what the step underway gives back

    def grant(self, seq: Sequence, end: int) -> None:
        """Give `seq` its tokens up to `end`, for which there is room, and guesses where there is room for those, too."""
        start = seq.num_computed_tokens
        tokens, num_logits = tuple(seq.tokens[start:end]), int(end == len(seq.tokens) and not seq.tails)
        if num_logits and self.draft is not None and seq.can_be_guessed:
            drafts = self.draft(seq, min(self.left - len(tokens), seq.request.max_tokens - end - 1))
            if drafts and (moves := self.memory.reserve(seq, end + len(drafts))) is not None:  # nobody is preempted for them
                self.move(moves)
                tokens, num_logits = tokens + drafts, 1 + len(drafts)
        self.rows[seq] = ScheduledRow(seq.request_id, start, tokens, self.memory.row(seq), num_logits, seq.beam)
        self.granted += len(tokens)

    def move(self, moves: Moves) -> None:
        """Let the memory's content be copied before the step."""
        if moves is NO_MOVES:
            return
        self.swap_out += moves.swap_out
        self.swap_in += moves.swap_in
        self.states_out += moves.states_out
        self.states_in += moves.states_in
        for block, copy in moves.copies:
            # All are copied at once: of a copy that this step makes itself, there is only what it is made from.
            self.copies[copy] = self.copies.get(block, block)

    def revoke(self, seq: Sequence) -> None:
        """Take back what `seq` was given in this step, if anything: it is preempted."""
        for member in seq.members:
            row = self.rows.pop(member, None)
            self.granted -= 0 if row is None else len(row.token_ids)
        self.preempted.append(seq.request_id)

    @property
    def left(self) -> int:
        """Tokens that may still be given."""
        return self.budget - self.granted

    def output(self) -> SchedulerOutput:
        """The step, composed."""
        return SchedulerOutput(
            rows=tuple(self.rows.values()),
            num_scheduled_tokens=self.granted,
            preempted=tuple(self.preempted),
            moves=Moves(
                tuple(self.swap_out),
                tuple(self.swap_in),
                tuple((block, copy) for copy, block in self.copies.items()),
                tuple(self.states_out),
                tuple(self.states_in),
            ),
            cached=tuple(self.cached),
        )
