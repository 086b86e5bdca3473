"""Answers: the requests in service, and what each is told: its tokens in order, and once how it ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from hf_cb.core.output import Emission
from hf_cb.engine_core import Admission
from hf_cb.errors import HFCBError, InvalidArgumentError
from hf_cb.handle import OutputQueue
from hf_cb.limits import Deadlines
from hf_cb.request import FinishReason
from hf_cb.stats import Meter
from hf_cb.watch import tell_ended


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request is to end."""

    queue: OutputQueue
    reason: FinishReason
    error: HFCBError | None = None


class Answers:
    """What the engine's thread owes to whom. A request is in here from `open` until `close` has told its end."""

    def __init__(self, meter: Meter) -> None:
        self.deadlines = Deadlines()
        self._meter = meter
        self._queues: dict[int, OutputQueue] = {}

    def __iter__(self) -> Iterator[OutputQueue]:
        return iter(list(self._queues.values()))

    def get(self, request_id: int) -> OutputQueue | None:
        """The queue of a request that is owed an answer; None for any other."""
        return self._queues.get(request_id)

    def open(self, queue: OutputQueue) -> None:
        """Take charge of a request that came in. Raises InvalidArgumentError for one that is in here already."""
        request_id = queue.request.request_id
        if request_id in self._queues:
            raise InvalidArgumentError(f"request: takes one that is not here yet; got {request_id} again")
        self._queues[request_id] = queue
        self._meter.prompt_tokens += len(queue.request.prompt)
        self.deadlines.add(queue)

    def admit(self, queue: OutputQueue, admission: Admission) -> None:
        """Note that a request runs now."""
        queue.admitted_at, queue.num_cached_tokens = admission.at, admission.num_cached_tokens
        waited = admission.at - queue.submitted_at
        self._meter.add_admission(waited, len(queue.request.prompt), admission.num_cached_tokens)

    def give(self, queue: OutputQueue, emission: Emission, now: float) -> None:
        """Hand over what a step has brought a request, `now` on `time.perf_counter()`'s clock. Not its end."""
        if emission.tokens:
            self._count(queue, len(emission.tokens), now)
            queue.put(emission.tokens, emission.notes, now)
        if emission.best is not None:
            self._meter.add_first_token(now - queue.submitted_at)
            self._meter.output_tokens += len(emission.best)
            queue.settle(emission.best, now)

    def _count(self, queue: OutputQueue, num_tokens: int, now: float) -> None:
        """Those that come at once share the time since the ones before."""
        waited = now - queue.last_token_at
        if not queue.tokens:
            self._meter.add_first_token(now - queue.submitted_at)
            num_tokens, waited = num_tokens - 1, 0.0
        for _ in range(num_tokens):
            self._meter.add_next_token(waited / num_tokens)

    def close(self, ending: Ending) -> None:
        """Tell a request its end; only the first one counts. The books come first: who has an answer finds it in them.

        It is told whatever the books or a watcher raise, and stays in here if that could not be done.
        """
        queue = ending.queue
        now = time.perf_counter()
        try:
            if queue.finish_reason is None:
                record = queue.record(ending.reason, ending.error, now)
                self._meter.add_request(record)
                if queue.watched:
                    tell_ended(queue.watched, record)
        finally:
            queue.close(ending.reason, ending.error, now)
        request_id = queue.request.request_id
        if self._queues.get(request_id) is queue:
            self.deadlines.forget(request_id)
            del self._queues[request_id]
