"""Running: the sequences that hold seats, and blocks."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items

from hf_cb.core.sequence import Sequence
from hf_cb.errors import EngineDeadError, InvalidArgumentError


class Running:
    """In the order of admission. A request takes as many of the `num_seats` as it has beams at the most, or one."""

    def __init__(self, num_seats: int) -> None:
        if num_seats < 1:
            raise InvalidArgumentError(f"max_batch_size: takes an integer >= 1; got {num_seats}")
        self.num_seats = num_seats
        self.num_taken = 0
        self._heads: dict[int, Sequence] = {}

    def __contains__(self, seq: Sequence) -> bool:
        return seq.request_id in self._heads

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._heads.values())

    def __len__(self) -> int:
        return len(self._heads)

    def get(self, request_id: int | None) -> Sequence | None:
        """The sequence of this request, if it runs."""
        return None if request_id is None else self._heads.get(request_id)

    def members(self) -> list[Sequence]:
        """What steps compute: all beams, and the sequences that have none."""
        return [member for head in self for member in (head.beams or (head,))]

    def has_seats_for(self, seq: Sequence) -> bool:
        """Whether `seq` may join."""
        return self.num_taken + seq.request.width <= self.num_seats

    def join(self, seq: Sequence) -> None:
        """`seq` is admitted."""
        self._heads[seq.request_id] = seq
        self.num_taken += seq.request.width

    def leave(self, seq: Sequence) -> None:
        """`seq` was preempted, or has ended."""
        del self._heads[seq.request_id]
        self.num_taken -= seq.request.width

    def check(self, running: Items[Sequence]) -> None:
        """Raise EngineDeadError unless these are all that run, and the seats are those that they take."""
        if {seq.request_id for seq in running} != self._heads.keys() or self.num_taken > self.num_seats:
            raise EngineDeadError("scheduler: the running sequences are not those that were admitted, or are too many")
        if sum(seq.request.width for seq in running) != self.num_taken:
            raise EngineDeadError("scheduler: the running sequences are not as many as it counts")
