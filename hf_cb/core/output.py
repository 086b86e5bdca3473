"""What the scheduler decides and what a step gives back: frozen data, the only things that cross to the runtime.

A `SchedulerOutput` is complete in itself, so that it can be logged, replayed, or sent to another rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from hf_cb.request import Choice, FinishReason, TokenNote

UNKNOWN = -1  # stands for a token that the step before samples, and whose value has not come back yet


class RowMemory(NamedTuple):
    """What a row shows of its sequence's memory. `block_table` covers the positions up to the row's last token.

    Of a model with states: the row begins with the state in slot `state`, or with none at its first token. It leaves its state
    in slots that it doesn't read: `states` has (position, slot) of each, in their order, the last one at the row's end.
    """

    block_table: tuple[int, ...]
    state: int | None = None
    states: tuple[tuple[int, int], ...] = ()


class Moves(NamedTuple):
    """What to copy before a step's rows are computed, in this order, once, whatever becomes of the rows."""

    swap_out: tuple[tuple[int, int], ...] = ()  # (block, host block); a step swaps in or out
    swap_in: tuple[tuple[int, int], ...] = ()  # (host block, block)
    copies: tuple[tuple[int, int], ...] = ()  # (block, its copy): a sequence is about to write where others have their tokens
    states_out: tuple[tuple[int, int], ...] = ()  # (slot, host slot)
    states_in: tuple[tuple[int, int], ...] = ()  # (host slot, slot)


NO_MOVES = Moves()


class ScheduledRow(NamedTuple):
    """One sequence's part of one step.

    `token_ids` are the tokens whose keys and values this step computes; the first stands at position `start` of its
    sequence; the last may be UNKNOWN. The row asks for the logits at its last `num_logits` positions: none while its tokens
    don't catch up with the sequence; one that gives the next token; or one more for each drafted token at the row's end,
    whose logits tell whether the next one is right, too. `beam`: which of the request's beams it is.
    """

    request_id: int
    start: int
    token_ids: tuple[int, ...]
    memory: RowMemory
    num_logits: int
    beam: int = 0

    @property
    def end(self) -> int:
        """The position after its last token that is no draft."""
        end = self.start + len(self.token_ids)
        return end if self.num_logits < 2 else end - self.num_logits + 1

    @property
    def drafts(self) -> tuple[int, ...]:
        """The tokens at its end that are guesses."""
        return self.token_ids[self.end - self.start :]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's batch. Empty `rows`: there is nothing to compute now."""

    rows: tuple[ScheduledRow, ...]
    num_scheduled_tokens: int
    preempted: tuple[int, ...] = ()  # request ids that lost their blocks while this step was composed
    moves: Moves = NO_MOVES
    # (request id, tokens found in the prefix cache) of those admitted the first time: news rather than a decision, told once.
    cached: tuple[tuple[int, int], ...] = field(default=(), compare=False)

    @classmethod
    def of_rows(cls, rows: tuple[ScheduledRow, ...]) -> SchedulerOutput:
        """A part of a step by itself, after what it moves has been moved."""
        return cls(rows, sum(len(row.token_ids) for row in rows))


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed: for every row that asks for logits its next tokens, or the error that belongs to that row alone.
    The beams of a search have no tokens, but a choice."""

    tokens: dict[int, tuple[int, ...]]  # request id -> sampled token ids, at least one, at most as many as the row's logits
    errors: dict[int, BaseException] = field(default_factory=dict)  # request id -> why that row has no token
    stopped: frozenset[int] = frozenset()  # request ids that end with their last token, by rules of their own
    notes: dict[int, tuple[TokenNote, ...]] = field(default_factory=dict)  # request id -> for its caller, with each token
    choices: dict[int, Choice] = field(default_factory=dict)  # request id -> how its beams go on, once all of them are computed

    @classmethod
    def of_parts(cls, parts: Iterable[StepResult]) -> StepResult:
        """One result of several, which have no request in common."""
        whole = cls({})
        for part in parts:
            whole = cls(
                whole.tokens | part.tokens,
                whole.errors | part.errors,
                whole.stopped | part.stopped,
                whole.notes | part.notes,
                whole.choices | part.choices,
            )
        return whole


class Emission(NamedTuple):
    """What `Scheduler.update` reports for one sequence: its new tokens, and why it ended if it did."""

    request_id: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    error: BaseException | None = None
    notes: tuple[TokenNote, ...] = ()  # one for each token, or none at all
    best: tuple[int, ...] | None = None  # of a search that has ended: all its output tokens
