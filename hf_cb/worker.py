"""Worker: the engine's thread. Sole owner of the scheduler, the block pool, the KV memory and the model twin.

Other threads reach it through its `Door`. Only this thread frees blocks.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from hf_cb import forks
from hf_cb.answers import Answers, Ending
from hf_cb.core.output import Emission
from hf_cb.door import Door, Replacement
from hf_cb.engine_core import EngineCore
from hf_cb.errors import EngineClosedError, EngineDeadError, HFCBError, failure_of
from hf_cb.handle import OutputQueue
from hf_cb.limits import QueueLimits, has_passed
from hf_cb.request import FinishReason
from hf_cb.runtime.model_runner import DEVICE_LOST
from hf_cb.stats import Meter

logger = logging.getLogger("hf_cb")


class Worker(Door):
    """One thread that turns requests into tokens."""

    def __init__(self, core: EngineCore, meter: Meter, limits: QueueLimits | None = None) -> None:
        super().__init__(core, meter, limits)
        self._counted = (0, 0)  # preemptions and swaps of this core that the meter has
        self._answers = Answers(meter)
        self._endings: list[Ending] = []  # of requests that are in no other place any more, or are to leave it
        _workers.add(self)

    @override
    def _run(self) -> None:
        try:
            while self._await_work():
                self._take_in()
                self._expire()
                if not self._parked and self.core.has_work:
                    self._step()
            self._end_all(EngineClosedError("the engine was shut down before this request ended"))
            self.core.end()
        except BaseException as error:
            self._die(error)

    def _await_work(self) -> bool:
        """Sleep while there is nothing to do. False: the thread is to end. Sets `_parked` while a pause holds."""
        with self._lock:
            while True:
                busy = self.core.has_work
                if self._closing == "now" or (self._closing and not busy and not self._inbox):
                    return False
                self._parked = self._pauses > 0 and not self._closing and not self.core.is_underway
                if self._parked:
                    self._park()
                if self._inbox_is_ready() or self._aborts or (busy and not self._parked):
                    return True
                if self._answers.deadlines.is_due:
                    return True
                self._changed.wait(self._answers.deadlines.seconds_left())

    @override
    def _park(self) -> None:
        if self._release_kv:
            self.core.release_kv()
            self._count_preemptions()
            self._release_kv = False
        self._changed.notify_all()

    def _inbox_is_ready(self) -> bool:
        """A replacement at the head waits until the old core is idle, and so does all that stands behind it."""
        if not self._inbox:
            return False
        return not isinstance(self._inbox[0], Replacement) or not self.core.has_work

    def _take_in(self) -> None:
        """Empty the inbox as far as a barrier allows, then apply the aborts.

        No queue is closed under the lock: a finalizer that takes it may run on a thread that holds a queue's. Who is to end
        waits in `_endings` until then. So whatever is raised, a request is always where somebody ends it.
        """
        with self._lock:
            while self._inbox_is_ready():
                item = self._inbox[0]
                if isinstance(item, Replacement):
                    self._exchange(item)
                else:
                    self._add(item)
                self._inbox.popleft()
            forget, self._forget = self._forget, False
            aborts, self._aborts = set(self._aborts), []
            while self._forgotten:
                aborts.add(self._forgotten.popleft())
            for item in list(self._inbox):  # behind a barrier: the engine core has not seen it
                if isinstance(item, OutputQueue) and (ending := _early_end(item, aborts)) is not None:
                    self._endings.append(ending)
                    self._inbox.remove(item)
        if forget:
            self.core.forget_prefixes()
        while self._endings:
            ending = self._endings[-1]
            self._for_one(ending.queue, self._end, ending.reason, ending.error)
            self._endings.pop()
        for request_id in aborts:
            self._for_one(self._answers.get(request_id), self._end, FinishReason.CANCELLED)

    def _exchange(self, replacement: Replacement) -> None:
        self.core = replacement.core
        self._counted = (0, 0)
        replacement.done.set()

    def _add(self, queue: OutputQueue) -> None:
        """Let the engine core know a request. What that raises ends this one alone: also InvalidArgumentError, where it was
        checked against a core that was replaced since, by one with fewer blocks."""
        try:
            self._answers.open(queue)
            self.core.add(queue.request)
        except BaseException as error:
            self._endings.append(self._blame(queue, error))

    def _expire(self) -> None:
        for request_id, is_for_admission in self._answers.deadlines.due():
            self._for_one(self._answers.get(request_id), self._expire_one, is_for_admission)

    def _expire_one(self, queue: OutputQueue, is_for_admission: bool) -> None:
        if not is_for_admission:
            self._end(queue, FinishReason.TIMEOUT)
        elif queue.admitted_at is None:
            load = self.core.load
            error = self._limits.never_admitted(queue.request.request_id, load.waiting, load.running)
            self._end(queue, FinishReason.TIMEOUT, error)

    def _for_one(self, queue: OutputQueue | None, act: Callable[..., None], *arguments: Any) -> None:
        """Do something for one request, None: for one that has ended. What that raises ends this one alone.

        If its end raises too, the engine dies: nobody knows then who holds which blocks.
        """
        if queue is None:
            return
        try:
            act(queue, *arguments)
        except BaseException as error:
            ending = self._blame(queue, error)
            try:
                self._end(queue, ending.reason, ending.error)
            except BaseException as another:
                raise error from another  # what it all began with

    def _end(self, queue: OutputQueue, reason: FinishReason, error: HFCBError | None = None) -> None:
        """Give a request's blocks back, if the scheduler has not ended it itself, and answer it."""
        request_id = queue.request.request_id
        if self._answers.get(request_id) is queue:
            self.core.abort(request_id, reason)
        self._answers.close(Ending(queue, reason, error))

    def _blame(self, queue: OutputQueue, error: BaseException) -> Ending:
        """How a request ends of what was raised for it. A lost device is everybody's affair, and is raised again."""
        if isinstance(error, DEVICE_LOST):
            raise error
        request_id = queue.request.request_id
        if not isinstance(error, HFCBError):
            logger.error("request %d failed; the engine goes on", request_id, exc_info=error)
            error = failure_of(request_id, error)
        return Ending(queue, FinishReason.FAILED, error)

    def _step(self) -> None:
        outcome = self.core.step(ahead=not self._pauses)  # a pause waits for what is underway
        now = time.perf_counter()
        self._meter.add(outcome.record)
        self._count_preemptions()
        for admission in outcome.admitted:
            self._for_one(self._answers.get(admission.request_id), self._answers.admit, admission)
        for emission in outcome.emissions:
            self._for_one(self._answers.get(emission.request_id), self._emit, emission, now)

    def _emit(self, queue: OutputQueue, emission: Emission, now: float) -> None:
        self._answers.give(queue, emission, now)
        if emission.finish_reason is not None:
            cause = emission.error
            error = None if cause is None else failure_of(emission.request_id, cause)
            self._end(queue, emission.finish_reason, error)

    def _count_preemptions(self) -> None:
        """By what is new since the last time: a scheduler's own counts end with it."""
        before, self._counted = self._counted, self.core.num_preemptions
        self._meter.preemptions += self._counted[0] - before[0]
        self._meter.swaps += self._counted[1] - before[1]

    def _die(self, cause: BaseException) -> None:
        with self._lock:
            self._dead = cause
            self._parked = False
            self._changed.notify_all()
        error = EngineDeadError(f"the engine died: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        with contextlib.ExitStack() as last:  # all three, the last one first, whatever one of them raises
            last.callback(logger.error, "the engine died", exc_info=cause)
            last.callback(self.core.end, str(error))
            last.callback(self._end_all, error)

    def _end_all(self, error: HFCBError) -> None:
        """Answer everybody. Nothing can come in any more: the door is closed before this is called."""
        with self._lock:
            replacements = [item for item in self._inbox if isinstance(item, Replacement)]
            queues = [item for item in self._inbox if isinstance(item, OutputQueue)]
        queues += [*(ending.queue for ending in self._endings), *self._answers]
        for replacement in replacements:
            replacement.done.set()
        failures = [raised for queue in queues if (raised := self._raised_by_end(queue, error)) is not None]
        if failures:
            raise failures[0]

    def _raised_by_end(self, queue: OutputQueue, error: HFCBError) -> BaseException | None:
        """Answer one of them. What that raises is returned: it must not keep the others from their answer."""
        try:
            if isinstance(error, EngineDeadError):  # its scheduler is not to be trusted
                self._answers.close(Ending(queue, FinishReason.FAILED, error))
            else:
                self._end(queue, FinishReason.FAILED, error)
        except BaseException as raised:
            return raised
        return None

    def after_fork_in_child(self) -> None:
        """The thread did not come along. Whoever waits here, or will, gets an error rather than a hang."""
        self._make_lock()
        self._dead = EngineDeadError(
            "this process was forked from the one that runs the engine; uninstall and install again in the child"
        )
        self._thread = None
        for queue in [*self._answers, *(item for item in self._inbox if isinstance(item, OutputQueue))]:
            queue.reset_lock_after_fork()
            queue.close(FinishReason.FAILED, EngineDeadError(str(self._dead)))


def _early_end(queue: OutputQueue, aborts: set[int]) -> Ending | None:
    """The end of a request that no engine core has seen, or None."""
    if queue.request.request_id in aborts:
        return Ending(queue, FinishReason.CANCELLED)
    return Ending(queue, FinishReason.TIMEOUT) if has_passed(queue) else None


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _close_workers() -> None:
    for worker in list(_workers):
        worker.close(drain=False, timeout=10)


def _mark_workers() -> None:
    for worker in list(_workers):
        worker.after_fork_in_child()


atexit.register(_close_workers)
forks.in_child(_mark_workers)
