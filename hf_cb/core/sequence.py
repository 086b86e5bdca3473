"""Sequence: the mutable state of one request, or of one of its beams, in the scheduler."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from hf_cb.core.prefix import PrefixNames
from hf_cb.request import FinishReason, Request, Status


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way. `arrival`: its number in the order of `Scheduler.add`; `arrived_at`: when that was, in seconds on
    `time.monotonic()`'s clock.

    `tokens`: the prompt, then the output; the last one is UNKNOWN while the step that samples it is underway. The keys and
    values of the first `num_computed_tokens` of them are in the blocks of `block_table`, which may cover more: what a step that
    has not ended will write. The first `num_cached_tokens` were there already when it was first admitted.

    A request with a search is one sequence, its trunk, until the prompt is computed; from then on its `beams` are sequences of
    their own, which hold the blocks. When they are preempted, they become a trunk again, of what they have in common, and
    `tails`: the tokens that each had beyond that.
    """

    request: Request
    arrival: int
    arrived_at: float = 0.0
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    tokens: list[int] = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None  # None: it was never admitted
    block_table: tuple[int, ...] = ()  # a tuple, so that a step's rows can hold it as it is until it grows
    num_shed: tuple[int, ...] = ()  # stretches of blocks given back, by group of layers that look back only so far
    host_blocks: tuple[int | None, ...] = ()  # while it waits: where its first `num_swapped_tokens` tokens' keys and values are
    num_swapped_tokens: int = 0
    num_published: int | None = 0  # of its blocks; None: no more of what it holds may be published
    names: PrefixNames | None = None  # made by the KV manager, when it has a use for them
    beams: tuple[Sequence, ...] = ()
    beam: int = 0  # which of its request's beams this is
    tails: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def request_id(self) -> int:
        """The request's id."""
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.tokens)

    @property
    def lacks(self) -> int:
        """Tokens whose keys and values are to be computed."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def members(self) -> tuple[Sequence, ...]:
        """The sequences that steps compute for this request: its beams, or itself."""
        return self.beams or (self,)

    def branch(self, beam: int, tokens: Tokens[int]) -> Sequence:
        """Beam `beam` of this sequence's request, which goes on from here with `tokens`. It holds no blocks yet."""
        seq = Sequence(self.request, self.arrival, self.arrived_at, beam=beam)
        seq.tokens = [*self.tokens, *tokens]
        seq.names = None if self.names is None else self.names.copy()
        return seq

    def fold(self) -> None:
        """Become the trunk of the beams again, as far as they are alike; each keeps at least one token to compute."""
        rows = [beam.tokens for beam in self.beams]
        length = min(map(len, rows)) - 1
        common = next((i for i in range(length) if len({row[i] for row in rows}) > 1), length)
        self.tails = tuple(tuple(row[common:]) for row in rows)
        self.tokens = rows[0][:common]
        self.beams = ()

    @property
    def is_full(self) -> bool:
        """Whether it has all the tokens that it may have, and ends as soon as the last one is known."""
        return len(self.tokens) >= self.request.max_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt)
