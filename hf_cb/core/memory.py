"""SequenceMemory: the one seam through which the memory of sequences is reserved, shared, moved and released.

The scheduler knows no blocks. It asks whether a sequence has room, lets it in, lets it grow, and lets it go. What stands behind
is the KV cache's blocks (`KVManager`); a slot for a recurrent state, or blocks of a fixed length for an encoder's output, are
other memories of the same sequences and keep to the same rules:

* What a sequence may begin with is found before it is admitted. A memory that can only start at certain places says so there.
* A step writes where `reserve` has made room. Until `commit`, nobody else is given what it wrote.
* Whatever is to be copied before a step computes comes back as `Moves`, once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from hf_cb.core.output import Moves, RowMemory
from hf_cb.core.sequence import Sequence
from hf_cb.request import Request


class Start(NamedTuple):
    """What a sequence begins with: blocks that others have computed, and the tokens that they hold for it."""

    blocks: tuple[int, ...]
    num_tokens: int
    state: int | None = None  # the slot with the state after those, of a model with states


class SequenceMemory(ABC):
    """The contract. Owned by the scheduler; not thread-safe, except `max_tokens` and `check_fits`."""

    num_groups: int
    """Groups of layers that keep a token each: a stored token counts once for each."""

    @property
    @abstractmethod
    def max_tokens(self) -> int:
        """The most tokens of prompt and output that one request can have. Never changes."""

    @abstractmethod
    def check_fits(self, request: Request) -> None:
        """Raise RequestTooLongError if `request` could not run to its end even alone."""

    @property
    @abstractmethod
    def blocks_used(self) -> int:
        """Blocks that sequences hold now."""

    @property
    @abstractmethod
    def tokens_stored(self) -> int:
        """Tokens whose keys and values are in those blocks, counted once for each group."""

    @abstractmethod
    def find_start(self, seq: Sequence, sibling: Sequence | None) -> Start | None:
        """What `seq`, which holds nothing, can begin with: what was published, or what `sibling` has, a running sequence with
        the same prompt. None: more is just being computed, and will be here soon."""

    @abstractmethod
    def can_admit(self, seq: Sequence, start: Start | None, num_running: int, is_crowded: bool) -> bool:
        """Whether `seq` has room for all of its tokens, and for those of its beams, beside what `num_running` sequences are
        about to take; `is_crowded`: one of them was preempted lately. `start`: None for one that was moved out."""

    @abstractmethod
    def admit(self, seq: Sequence, start: Start | None) -> Moves:
        """Let `seq` begin with what `find_start` has just found; None: with what was moved out of it."""

    @abstractmethod
    def reserve(self, seq: Sequence, num_tokens: int) -> Moves | None:
        """Make room for `seq`'s first `num_tokens` tokens, which it can write to from `num_computed_tokens` on. None, nothing
        changed: not now. Raises RequestTooLongError if the whole memory would not do."""

    @abstractmethod
    def row(self, seq: Sequence) -> RowMemory:
        """What a step's row shows of it to the runtime."""

    def advance(self, seq: Sequence) -> None:
        """A step has brought `seq` to `num_computed_tokens`, or will without being tried again: what it began with may go."""

    @abstractmethod
    def commit(self, seq: Sequence, num_tokens: int) -> None:
        """The step that wrote `seq`'s tokens up to `num_tokens` has succeeded: share them, give back what it sees no more."""

    @abstractmethod
    def branch(self, seqs: Iterable[Sequence], branches: Iterable[tuple[Sequence, Sequence]]) -> None:
        """Put new sequences in the place of `seqs`: (parent, branch) each, where the branch has what its parent has."""

    @abstractmethod
    def cost_of_move(self, seq: Sequence) -> int | None:
        """Blocks to copy to move `seq` out; None: there is no room for them now, or nothing to move."""

    @abstractmethod
    def move_out(self, seq: Sequence) -> Moves:
        """Release what `seq` holds, and keep its content on the host."""

    @abstractmethod
    def release(self, seq: Sequence) -> None:
        """Give back all that `seq` holds, wherever it is; nothing of it counts as computed any more."""

    @abstractmethod
    def forget_prefixes(self) -> None:
        """Let nobody find what was computed up to now: it is out of date. Who holds some of it goes on with that."""

    @abstractmethod
    def check(self) -> None:
        """Raise EngineDeadError unless the books are sound."""
