"""Order of service: which waiting sequence is next, and which running one gives way when blocks run out.

To supply one's own, subclass `Policy` and give the class to `CBConfig.policy`; each engine makes its own object of it. What a
policy may look at: `Sequence.request.service` (priority, tenant), `arrival` and `arrived_at`, `num_tokens`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from typing_extensions import override

from hf_cb.core.sequence import Sequence


@runtime_checkable
class Policy(Protocol):
    """Holds the waiting sequences of one scheduler, in its order. Called on the engine's thread alone.

    So that the scheduler always gets on, `victim` must agree with some ranking of the sequences that changes only when one
    arrives or gets a token: the first is then not preempted before it has got on itself.
    """

    def enqueue(self, seq: Sequence) -> None:
        """`seq` arrived and waits."""

    def put_back(self, seq: Sequence) -> None:
        """`seq` was preempted and waits again."""

    def remove(self, seq: Sequence) -> None:
        """`seq`, which waits, waits no more: it was admitted, or it ended."""

    def next_waiting(self) -> Sequence | None:
        """The waiting sequence that is to be admitted next; it goes on waiting until `remove`."""

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """The least deserving of `running`, which are one or more, in the order of their admission."""

    def charge(self, seq: Sequence, prompt_tokens: int, output_tokens: int) -> None:
        """`seq` was admitted the first time, with so many prompt tokens to compute, or has got so many output tokens."""
        return

    def __len__(self) -> int:
        """How many sequences wait."""
        ...


class FCFS(Policy):
    """First come, first served: who arrived first is admitted first and preempted last."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()

    @override
    def enqueue(self, seq: Sequence) -> None:
        self._waiting[seq.request_id] = seq

    @override
    def put_back(self, seq: Sequence) -> None:
        self._waiting[seq.request_id] = seq
        self._waiting.move_to_end(seq.request_id, last=False)

    @override
    def remove(self, seq: Sequence) -> None:
        del self._waiting[seq.request_id]

    @override
    def next_waiting(self) -> Sequence | None:
        return next(iter(self._waiting.values()), None)

    @override
    def victim(self, running: Iterable[Sequence]) -> Sequence:
        return max(running, key=lambda seq: seq.arrival)

    def __len__(self) -> int:
        return len(self._waiting)
