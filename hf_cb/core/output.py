"""What the scheduler decides and what a step gives back: frozen data, the only things that cross to the runtime.

A `SchedulerOutput` is complete in itself, so that it can be logged, replayed, or sent to another rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from hf_cb.request import Choice, FinishReason, TokenNote

UNKNOWN = -1  # stands for a token that the step before samples, and whose value has not come back yet


class ScheduledRow(NamedTuple):
    """One sequence's part of one step.

    `token_ids` are the tokens whose keys and values this step computes; the first stands at position `start` of its
    sequence; the last may be UNKNOWN. `block_table` covers positions 0 .. start + len(token_ids) - 1. `samples` is true when
    these tokens catch up with the sequence, so that the last one's logits give its next token. `beam`: which of the request's
    beams it is.
    """

    request_id: int
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    samples: bool
    beam: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's batch. Empty `rows`: there is nothing to compute now."""

    rows: tuple[ScheduledRow, ...]
    num_scheduled_tokens: int
    preempted: tuple[int, ...] = ()  # request ids that lost their blocks while this step was composed
    # Blocks to copy before the rows are computed, in this order, once, whatever becomes of the rows. A step swaps in or out.
    swap_out: tuple[tuple[int, int], ...] = ()  # (block, host block)
    swap_in: tuple[tuple[int, int], ...] = ()  # (host block, block)
    copies: tuple[tuple[int, int], ...] = ()  # (block, its copy): a sequence is about to write where others have their tokens
    # (request id, tokens found in the prefix cache) of those admitted the first time: news rather than a decision, told once.
    cached: tuple[tuple[int, int], ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed: a token for every row that samples, or the error that belongs to that row alone. The beams of a
    search have no tokens, but a choice."""

    tokens: dict[int, int]  # request id -> sampled token id
    errors: dict[int, BaseException] = field(default_factory=dict)  # request id -> why that row has no token
    stopped: frozenset[int] = frozenset()  # request ids that end with their token, by rules of their own
    notes: dict[int, TokenNote] = field(default_factory=dict)  # request id -> what goes to its caller with the token
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
    """What `Scheduler.update` reports for one sequence: its new token, and why it ended if it did."""

    request_id: int
    token: int | None
    finish_reason: FinishReason | None
    error: BaseException | None = None
    note: TokenNote | None = None
    best: tuple[int, ...] | None = None  # of a search that has ended: all its output tokens
