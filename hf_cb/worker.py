"""Worker: the engine's thread. Sole owner of the scheduler, the block pool, the KV memory and the model twin.

Other threads reach it through the inbox only. The rules of that door:

* Checking that the engine is open, putting a request in and waking the thread are one critical section, and closing takes
  the same lock: a request that got in is always answered, one that did not raises on its caller's thread.
* Only this thread frees blocks. Aborts and deadlines take effect between two steps.
* The thread starts with the first request and is a daemon; it is joined at shutdown and at interpreter exit.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_cb.answers import Answers, Ending
from hf_cb.blocking import block
from hf_cb.core.output import Emission
from hf_cb.engine_core import EngineCore
from hf_cb.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineOverloadedError,
    HFCBError,
    UnsupportedCallError,
    failure_of,
)
from hf_cb.handle import OutputQueue
from hf_cb.limits import QueueLimits, has_passed
from hf_cb.request import FinishReason
from hf_cb.runtime.model_runner import DEVICE_LOST
from hf_cb.stats import Meter

logger = logging.getLogger("hf_cb")


@dataclass(slots=True)
class _Replacement:
    """A barrier in the inbox: what came before ends on the old core, what comes after starts on the new."""

    core: EngineCore
    done: threading.Event


class Worker:
    """One thread that turns requests into tokens. All public methods may be called from any thread."""

    def __init__(self, core: EngineCore, meter: Meter, limits: QueueLimits | None = None) -> None:
        """`meter`: the engine's, which outlives a worker; nobody else writes to it while this one lives."""
        self.core = core
        self._limits = limits or QueueLimits()
        self._meter = meter
        self._counted = (0, 0)  # preemptions and swaps of this core that the meter has
        self._make_lock()
        # Guarded by _lock:
        self._inbox: deque[OutputQueue | _Replacement] = deque()
        self._aborts: list[int] = []
        self._thread: threading.Thread | None = None
        self._closing: str | None = None  # "drain" or "now"
        self._dead: BaseException | None = None
        self._pauses = 0
        self._pausing: list[int] = []  # threads that pause, as often as they do
        self._parked = False
        self._release_kv = False  # to be done when it is parked
        self._forget = False  # the prefix cache is to be emptied before anything else is scheduled
        # Lock-free, for the garbage collector: ids whose handle is gone.
        self._forgotten: deque[int] = deque()
        # The worker thread's own:
        self._answers = Answers(meter)
        self._endings: list[Ending] = []  # of requests that are in no other place any more, or are to leave it
        _workers.add(self)

    def _make_lock(self) -> None:
        self._lock = threading.RLock()  # what `with` takes: as in OutputQueue, not the condition
        self._changed = threading.Condition(self._lock)

    # -- the door ---------------------------------------------------------------------------------------------------------

    def submit(self, queues: Sequence[OutputQueue]) -> None:
        """Take in, all or none. Raises EngineClosedError, EngineDeadError, EngineOverloadedError; on the worker itself
        UnsupportedCallError."""
        self.refuse_own_thread("submit")
        with self._lock:
            self._check_open()
            scheduler = self.core.scheduler
            waiting = len(self._inbox) + scheduler.num_waiting
            num_new = sum(queue.request.width for queue in queues)
            try:
                self._limits.check(num_new, waiting, scheduler.num_running, scheduler.num_seats)
            except EngineOverloadedError:
                self._meter.rejected += len(queues)
                raise
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="hf_cb-engine", daemon=True)
                thread.start()  # may raise: nothing has come in then
                self._thread = thread
            if self._limits.queue_timeout is not None:
                admit_by = time.monotonic() + self._limits.queue_timeout
                for queue in queues:
                    queue.admit_by = admit_by
            self._inbox.extend(queues)
            self._changed.notify_all()

    def refuse_own_thread(self, name: str) -> None:
        """Raise UnsupportedCallError on the engine's own thread, where a processor or criterion of a caller's may run."""
        if threading.current_thread() is self._thread:
            raise UnsupportedCallError(f"{name}: called on the engine's own thread, which would wait for itself")

    @property
    def is_paused_by_caller(self) -> bool:
        """Whether the calling thread is inside of a pause of its own."""
        return threading.get_ident() in self._pausing

    def abort(self, request_id: int) -> None:
        """Cancel a request at the next step boundary; ids that are unknown or have ended are fine."""
        with self._lock:
            self._aborts.append(request_id)
            self._changed.notify_all()

    def forget(self, request_id: int) -> None:
        """The same for a dropped handle: takes no lock and wakes nobody, so that a finalizer may call it anywhere."""
        self._forgotten.append(request_id)

    def replace(self, core: EngineCore) -> None:
        """Go on with another core once all that was submitted before has ended; returns when it is in place."""
        self.refuse_own_thread("replace")
        if self.is_paused_by_caller:
            raise UnsupportedCallError("pause: the model has changed inside of it, and this call would wait for its end")
        done = threading.Event()
        with self._lock:
            self._check_open()
            if self._thread is None:
                self.core = core
                return
            self._inbox.append(_Replacement(core, done))
            self._changed.notify_all()
        block(done.wait)
        with self._lock:
            self._check_open()

    def pause(self, release_kv: bool = False) -> None:
        """Return when no step runs and none will until `resume`, and the KV memory is given back, if so wanted. Calls nest."""
        self.refuse_own_thread("pause")
        with self._lock:
            self._check_open()
            try:
                self._pauses += 1
                self._pausing.append(threading.get_ident())
                self._release_kv |= release_kv
                if self._thread is None:
                    self._park()
                self._changed.notify_all()
                block(lambda seconds: self._changed.wait_for(self._is_still, seconds))
                self._check_open()  # one that was closed meanwhile may go on with steps to its end
            except BaseException:  # Ctrl-C too: nobody would undo this pause
                self.resume()
                raise

    def _is_still(self) -> bool:
        """Whether nobody has to wait for a pause any more."""
        is_parked = self._parked and not self._release_kv
        return is_parked or self._thread is None or self._closing is not None or self._dead is not None

    def resume(self) -> None:
        """Undo one `pause`."""
        with self._lock:
            self._pauses = max(0, self._pauses - 1)
            with contextlib.suppress(ValueError):  # resumed by another thread than it was paused by
                self._pausing.remove(threading.get_ident())
            self._release_kv &= self._pauses > 0
            self._forget = True  # the weights may be others now
            self._changed.notify_all()

    def forget_prefixes(self) -> None:
        """Empty the prefix cache before anything is scheduled that comes in after this."""
        with self._lock:
            self._forget = True

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more requests. With `drain`, finish those there are (pauses end); else end them with EngineClosedError.

        Waits for the thread, at most `timeout` seconds. Closing again is fine.
        """
        with self._lock:
            if self._closing != "now":
                self._closing = "drain" if drain else "now"
            self._changed.notify_all()
            thread = self._thread
        if thread is None:
            self.core.end()
        elif thread is not threading.current_thread():
            block(functools.partial(_join, thread), timeout)

    def _check_open(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the engine died: {self._dead}") from self._dead
        if self._closing is not None:
            raise EngineClosedError("the engine was shut down and takes no more requests")

    @property
    def is_open(self) -> bool:
        """Whether `submit` would take a request."""
        return self._dead is None and self._closing is None

    # -- the thread -------------------------------------------------------------------------------------------------------

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

    def _park(self) -> None:
        """A pause holds: tell those who wait for it. With the lock held."""
        if self._release_kv:
            self.core.release_kv()
            self._count_preemptions()
            self._release_kv = False
        self._changed.notify_all()

    def _inbox_is_ready(self) -> bool:
        """A replacement at the head waits until the old core is idle, and so does all that stands behind it."""
        if not self._inbox:
            return False
        return not isinstance(self._inbox[0], _Replacement) or not self.core.has_work

    def _take_in(self) -> None:
        """Empty the inbox as far as a barrier allows, then apply the aborts.

        No queue is closed under the lock: a finalizer that takes it may run on a thread that holds a queue's. Who is to end
        waits in `_endings` until then. So whatever is raised, a request is always where somebody ends it.
        """
        with self._lock:
            while self._inbox_is_ready():
                item = self._inbox[0]
                if isinstance(item, _Replacement):
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

    def _exchange(self, replacement: _Replacement) -> None:
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
            scheduler = self.core.scheduler
            waiting, running = scheduler.num_waiting, scheduler.num_running
            error = self._limits.never_admitted(queue.request.request_id, waiting, running)
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
            self.core.scheduler.abort(request_id, reason)
            self.core.runner.remove(request_id)
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
        scheduler, (preemptions, swaps) = self.core.scheduler, self._counted
        self._counted = (scheduler.num_preemptions, scheduler.num_swaps)
        self._meter.preemptions += scheduler.num_preemptions - preemptions
        self._meter.swaps += scheduler.num_swaps - swaps

    # -- the end ----------------------------------------------------------------------------------------------------------

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
            replacements = [item for item in self._inbox if isinstance(item, _Replacement)]
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


def _join(thread: threading.Thread, seconds: float) -> bool:
    thread.join(seconds)
    return not thread.is_alive()


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _close_workers() -> None:
    for worker in list(_workers):
        worker.close(drain=False, timeout=10)


def _mark_workers() -> None:
    for worker in list(_workers):
        worker.after_fork_in_child()


atexit.register(_close_workers)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_workers)
