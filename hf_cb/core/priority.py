"""Priority: lower first, and nobody waits for ever."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from typing_extensions import override

from hf_cb.core.policy import Policy
from hf_cb.core.sequence import Sequence

_SECONDS_PER_LEVEL = 10.0


class Priority(Policy):
    """The lowest `Service.priority` is admitted first and preempted last; among equals the first to arrive.

    Waiting counts: `seconds_per_level` seconds are worth one level. So a sequence is only ever overtaken by one that is d
    levels before it if that arrived less than d x `seconds_per_level` seconds after it, which bounds its wait. All that wait
    age alike, so their order never changes: it is that of priority x seconds_per_level + time of arrival.
    """

    def __init__(self, seconds_per_level: float = _SECONDS_PER_LEVEL) -> None:
        self._seconds_per_level = seconds_per_level
        self._waiting: dict[int, Sequence] = {}
        self._heap: list[tuple[tuple[float, int], int]] = []  # (rank, request id), with some that wait no more

    @override
    def enqueue(self, seq: Sequence) -> None:
        self._waiting[seq.request_id] = seq
        heapq.heappush(self._heap, (self._rank(seq), seq.request_id))

    put_back = enqueue

    @override
    def remove(self, seq: Sequence) -> None:
        del self._waiting[seq.request_id]

    @override
    def next_waiting(self) -> Sequence | None:
        while self._heap:
            seq = self._waiting.get(self._heap[0][1])
            if seq is not None:
                return seq
            heapq.heappop(self._heap)
        return None

    @override
    def victim(self, running: Iterable[Sequence]) -> Sequence:
        return max(running, key=self._rank)

    def __len__(self) -> int:
        return len(self._waiting)

    def _rank(self, seq: Sequence) -> tuple[float, int]:
        return seq.request.service.priority * self._seconds_per_level + seq.arrived_at, seq.arrival
