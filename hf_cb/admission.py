"""QueueLimits: who is turned away at the door, and how long one may wait behind it."""

from __future__ import annotations

from dataclasses import dataclass

from hf_cb.errors import EngineOverloadedError, RequestTimeoutError


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
