"""Sequence: the mutable state of one request, or of one of its beams, in the scheduler."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from hf_cb.core.holding import Holding
from hf_cb.core.output import UNKNOWN
from hf_cb.errors import EngineDeadError
from hf_cb.request import Request, Status


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way. `arrival`: its number in the order of `Scheduler.add`; `arrived_at`: when that was, in seconds on
    `time.monotonic()`'s clock.

    `tokens`: the prompt, then the output; the last one is UNKNOWN while the step that samples it is underway. The keys and
    values of the first `num_computed_tokens` of them are in what it holds, which may cover more: what a step that has not
    ended will write. The first `num_cached_tokens` were there already when it was first admitted.

    A request with a search is one sequence, its trunk, until the prompt is computed; from then on its `beams` are sequences of
    their own, which hold the blocks. When they are preempted, they become a trunk again, of what they have in common, and
    `tails`: the tokens that each had beyond that.
    """

    request: Request
    arrival: int
    arrived_at: float = 0.0
    status: Status = Status.WAITING
    tokens: list[int] = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None  # None: it was never admitted
    held: Holding = field(default_factory=Holding)  # of the memory
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

    @property
    def can_be_guessed(self) -> bool:
        """Whether tokens may be drafted after its last one: that is known, and it has no beams."""
        return self.request.search is None and self.tokens[-1] != UNKNOWN

    def learn(self, position: int, tokens: tuple[int, ...] | None) -> tuple[int, ...]:
        """Take in the `tokens` from `position` on, and return them: those up to one that ends it, or to its length.

        Raises EngineDeadError for none, and where others are expected.
        """
        if not tokens:
            raise EngineDeadError(f"request {self.request_id}: the step gave neither a token nor an error")
        if self.tokens[position] != UNKNOWN or (len(tokens) > 1 and position + 1 != len(self.tokens)):
            raise EngineDeadError(f"request {self.request_id}: the result is not that of the oldest step")
        self.tokens[position] = tokens[0]
        if len(tokens) > 1:
            ends = (i + 1 for i, token in enumerate(tokens) if token in self.request.eos_token_ids)
            tokens = tokens[: min(next(ends, len(tokens)), self.request.max_tokens - position)]
            self.tokens += tokens[1:]
        return tokens

    def branch(self, beam: int, tokens: Tokens[int]) -> Sequence:
        """Beam `beam` of this sequence's request, which goes on from here with `tokens`. It holds no blocks yet."""
        seq = Sequence(self.request, self.arrival, self.arrived_at, beam=beam)
        seq.tokens = [*self.tokens, *tokens]
        seq.held.names = None if self.held.names is None else self.held.names.copy()
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
