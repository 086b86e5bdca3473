"""Limits in time and number: who is turned away at the door, and when a request ends that has not ended by itself."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass

from hf_cb.errors import EngineOverloadedError, RequestTimeoutError
from hf_cb.handle import OutputQueue


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """`max_queue_size`: the most requests that wait. `queue_timeout`: seconds until one that was never admitted ends.

    None: no limit.
    """

    max_queue_size: int | None = None
    queue_timeout: float | None = None

    def check(self, num_new: int, num_waiting: int, num_running: int, num_seats: int) -> None:
        """Raise EngineOverloadedError, with these figures, if so many new requests would make the queue too long.

        `num_seats`: how many that wait can be admitted at once; they don't count as waiting.
        """
        limit = self.max_queue_size
        if limit is not None and num_waiting + num_new > limit + num_seats:
            raise EngineOverloadedError(
                f"max_queue_size: takes at most {limit} waiting requests; {num_waiting} wait and {num_running} run, and "
                f"{num_new} more came in; try again later"
            )

    def never_admitted(self, request_id: int, num_waiting: int, num_running: int) -> RequestTimeoutError:
        """What a request gets whose `queue_timeout` has passed."""
        return RequestTimeoutError(
            f"queue_timeout: request {request_id} was not admitted within {self.queue_timeout} s; "
            f"{num_waiting} wait and {num_running} run"
        )


class Deadlines:
    """A heap of moments on `time.monotonic()`'s clock. Not thread-safe.

    A request that ended stays in it until its moment has come, or until such are more than half.
    """

    def __init__(self) -> None:
        self._ended: set[int] = set()
        self._heap: list[tuple[float, int, bool]] = []  # (when, request id, whether it is enough to have been admitted)

    def add(self, queue: OutputQueue) -> None:
        """Watch over a request that came in."""
        for when, is_for_admission in ((queue.request.deadline, False), (queue.admit_by, True)):
            if when is not None:
                heapq.heappush(self._heap, (when, queue.request.request_id, is_for_admission))

    def forget(self, request_id: int) -> None:
        """A request has ended. Fine for one that has no deadline."""
        if not self._heap:
            return
        self._ended.add(request_id)
        if len(self._ended) > 32 + len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[1] not in self._ended]
            heapq.heapify(self._heap)
            self._ended.clear()

    def seconds_left(self) -> float | None:
        """Until the next one, negative if it has passed; None: there is none."""
        return self._heap[0][0] - time.monotonic() if self._heap else None

    @property
    def is_due(self) -> bool:
        """Whether a deadline has passed."""
        left = self.seconds_left()
        return left is not None and left <= 0

    def due(self) -> Iterator[tuple[int, bool]]:
        """Take those that have passed: (request id, whether it is enough to have been admitted)."""
        while self.is_due:
            _, request_id, is_for_admission = heapq.heappop(self._heap)
            yield request_id, is_for_admission


def has_passed(queue: OutputQueue) -> bool:
    """Whether either deadline of a request that was not admitted yet has passed."""
    ends = [when for when in (queue.request.deadline, queue.admit_by) if when is not None]
    return bool(ends) and min(ends) <= time.monotonic()
