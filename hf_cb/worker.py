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
from collections.abc import Sequence
from dataclasses import dataclass

from hf_cb.admission import QueueLimits
from hf_cb.blocking import block
from hf_cb.core.output import Emission
from hf_cb.deadlines import Deadlines, has_passed
from hf_cb.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineOverloadedError,
    HFCBError,
    InvalidArgumentError,
    UnsupportedCallError,
)
from hf_cb.handle import OutputQueue
from hf_cb.machinery import Machinery, failure_of
from hf_cb.request import FinishReason
from hf_cb.stats import Meter
from hf_cb.watch import tell_ended

logger = logging.getLogger("hf_cb")


@dataclass(slots=True)
class _Replacement:
    """A barrier in the inbox: what came before ends on the old machinery, what comes after starts on the new."""

    machinery: Machinery
    done: threading.Event


class Worker:
    """One thread that turns requests into tokens. All public methods may be called from any thread."""

    def __init__(self, machinery: Machinery, meter: Meter, limits: QueueLimits | None = None) -> None:
        """`meter`: the engine's, which outlives a worker; nobody else writes to it while this one lives."""
        self.machinery = machinery
        self._limits = limits or QueueLimits()
        self._meter = meter
        self._counted = (0, 0)  # preemptions and swaps of this machinery that the meter has
        self._changed = threading.Condition()
        # Guarded by _changed:
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
        self._queues: dict[int, OutputQueue] = {}
        self._deadlines = Deadlines()
        _workers.add(self)

    # -- the door ---------------------------------------------------------------------------------------------------------

    def submit(self, queues: Sequence[OutputQueue]) -> None:
        """Take in, all or none. Raises EngineClosedError, EngineDeadError, EngineOverloadedError; on the worker itself
        UnsupportedCallError."""
        self.refuse_own_thread("submit")
        with self._changed:
            self._check_open()
            scheduler = self.machinery.scheduler
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
        with self._changed:
            self._aborts.append(request_id)
            self._changed.notify_all()

    def forget(self, request_id: int) -> None:
        """The same for a dropped handle: takes no lock and wakes nobody, so that a finalizer may call it anywhere."""
        self._forgotten.append(request_id)

    def replace(self, machinery: Machinery) -> None:
        """Go on with other machinery once all that was submitted before has ended; returns when it is in place."""
        self.refuse_own_thread("replace")
        if self.is_paused_by_caller:
            raise UnsupportedCallError("pause: the model has changed inside of it, and this call would wait for its end")
        done = threading.Event()
        with self._changed:
            self._check_open()
            if self._thread is None:
                self.machinery = machinery
                return
            self._inbox.append(_Replacement(machinery, done))
            self._changed.notify_all()
        block(done.wait)
        with self._changed:
            self._check_open()

    def pause(self, release_kv: bool = False) -> None:
        """Return when no step runs and none will until `resume`, and the KV memory is given back, if so wanted. Calls nest."""
        self.refuse_own_thread("pause")
        with self._changed:
            self._check_open()
            self._pauses += 1
            self._pausing.append(threading.get_ident())
            self._release_kv |= release_kv
            try:
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
        with self._changed:
            self._pauses = max(0, self._pauses - 1)
            with contextlib.suppress(ValueError):  # resumed by another thread than it was paused by
                self._pausing.remove(threading.get_ident())
            self._release_kv &= self._pauses > 0
            self._forget = True  # the weights may be others now
            self._changed.notify_all()

    def forget_prefixes(self) -> None:
        """Empty the prefix cache before anything is scheduled that comes in after this."""
        with self._changed:
            self._forget = True

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more requests. With `drain`, finish those there are (pauses end); else end them with EngineClosedError.

        Waits for the thread, at most `timeout` seconds. Closing again is fine.
        """
        with self._changed:
            if self._closing != "now":
                self._closing = "drain" if drain else "now"
            self._changed.notify_all()
            thread = self._thread
        if thread is None:
            self.machinery.end()
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
                if not self._parked and self.machinery.has_work:
                    self._step()
            self._end_all(EngineClosedError("the engine was shut down before this request ended"))
            self.machinery.end()
        except BaseException as error:
            logger.exception("the engine died")
            self._die(error)

    def _await_work(self) -> bool:
        """Sleep while there is nothing to do. False: the thread is to end. Sets `_parked` while a pause holds."""
        with self._changed:
            while True:
                busy = self.machinery.has_work
                if self._closing == "now" or (self._closing and not busy and not self._inbox):
                    return False
                self._parked = self._pauses > 0 and not self._closing and not self.machinery.is_underway
                if self._parked:
                    self._park()
                if self._inbox_is_ready() or self._aborts or (busy and not self._parked):
                    return True
                if self._deadlines.is_due:
                    return True
                self._changed.wait(self._deadlines.seconds_left())

    def _park(self) -> None:
        """A pause holds: tell those who wait for it. With the lock held."""
        if self._release_kv:
            self.machinery.release_kv()
            self._count_preemptions()
            self._release_kv = False
        self._changed.notify_all()

    def _inbox_is_ready(self) -> bool:
        """A replacement at the head waits until the old machinery is idle, and so does all that stands behind it."""
        if not self._inbox:
            return False
        return not isinstance(self._inbox[0], _Replacement) or not self.machinery.has_work

    def _take_in(self) -> None:
        """Empty the inbox as far as a barrier allows, then apply the aborts.

        No queue is closed under the lock: a finalizer that takes it may run on a thread that holds a queue's.
        """
        early: list[tuple[OutputQueue, FinishReason, HFCBError | None]] = []
        with self._changed:
            while self._inbox_is_ready():
                item = self._inbox.popleft()
                if isinstance(item, _Replacement):
                    self.machinery = item.machinery
                    self._counted = (0, 0)
                    item.done.set()
                    continue
                try:
                    self._add(item)
                except InvalidArgumentError as refusal:
                    # Checked against machinery that was replaced since, by one with fewer blocks; or here already.
                    early.append((item, FinishReason.FAILED, refusal))
            forget, self._forget = self._forget, False
            aborts, self._aborts = set(self._aborts), []
            while self._forgotten:
                aborts.add(self._forgotten.popleft())
            for item in list(self._inbox):  # behind a barrier: the machinery has not seen it
                reason = _ended_early(item, aborts) if isinstance(item, OutputQueue) else None
                if isinstance(item, OutputQueue) and reason is not None:
                    self._inbox.remove(item)
                    early.append((item, reason, None))
        if forget:
            self.machinery.forget_prefixes()
        for queue, finish_reason, error in early:
            self._end(queue, finish_reason, error)
        for request_id in aborts:
            self._finish(request_id, FinishReason.CANCELLED)

    def _add(self, queue: OutputQueue) -> None:
        request = queue.request
        self.machinery.add(request)
        self._queues[request.request_id] = queue
        self._meter.prompt_tokens += len(request.prompt)
        self._deadlines.add(queue)

    def _expire(self) -> None:
        for request_id, is_for_admission in self._deadlines.due():
            if not is_for_admission:
                self._finish(request_id, FinishReason.TIMEOUT)
            elif request_id in self._queues and self._queues[request_id].admitted_at is None:
                scheduler = self.machinery.scheduler
                error = self._limits.never_admitted(request_id, scheduler.num_waiting, scheduler.num_running)
                self._finish(request_id, FinishReason.TIMEOUT, error)

    def _finish(self, request_id: int, reason: FinishReason, error: HFCBError | None = None) -> None:
        """End a request that the scheduler has not ended itself, and give its blocks back."""
        if request_id in self._queues:
            self.machinery.scheduler.abort(request_id, reason)
            self._close_queue(request_id, reason, error)

    def _close_queue(self, request_id: int, reason: FinishReason, error: HFCBError | None = None) -> None:
        self.machinery.runner.remove(request_id)
        self._deadlines.forget(request_id)
        self._end(self._queues.pop(request_id), reason, error)

    def _end(self, queue: OutputQueue, reason: FinishReason, error: HFCBError | None = None) -> None:
        """Answer a request. The books come first: who has an answer finds it in them."""
        record = queue.record(reason, error)
        self._meter.add_request(record)
        if queue.watched:
            tell_ended(queue.watched, record)
        queue.close(reason, error, record.finished_at)

    def _step(self) -> None:
        outcome = self.machinery.step(ahead=not self._pauses)  # a pause waits for what is underway
        now = time.perf_counter()
        self._meter.add(outcome.record)
        self._count_preemptions()
        for request_id, num_tokens, admitted_at in outcome.admitted:
            queue = self._queues[request_id]
            queue.admitted_at, queue.num_cached_tokens = admitted_at, num_tokens
            self._meter.add_admission(admitted_at - queue.submitted_at, len(queue.request.prompt), num_tokens)
        for emission in outcome.emissions:
            self._emit(emission, now)

    def _emit(self, emission: Emission, now: float) -> None:
        queue = self._queues[emission.request_id]
        if emission.token is not None:
            if queue.tokens:
                self._meter.add_next_token(now - queue.last_token_at)
            else:
                self._meter.add_first_token(now - queue.submitted_at)
            queue.put(emission.token, emission.note, now)
        if emission.best is not None:
            self._meter.add_first_token(now - queue.submitted_at)
            self._meter.output_tokens += len(emission.best)
            queue.settle(emission.best, now)
        if emission.finish_reason is not None:
            self._close_queue(emission.request_id, emission.finish_reason, failure_of(emission))

    def _count_preemptions(self) -> None:
        """By what is new since the last time: a scheduler's own counts end with it."""
        scheduler, (preemptions, swaps) = self.machinery.scheduler, self._counted
        self._counted = (scheduler.num_preemptions, scheduler.num_swaps)
        self._meter.preemptions += scheduler.num_preemptions - preemptions
        self._meter.swaps += scheduler.num_swaps - swaps

    # -- the end ----------------------------------------------------------------------------------------------------------

    def _die(self, cause: BaseException) -> None:
        with self._changed:
            self._dead = cause
            self._parked = False
            self._changed.notify_all()
        error = EngineDeadError(f"the engine died: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        self._end_all(error)
        self.machinery.end(str(error))

    def _end_all(self, error: HFCBError) -> None:
        """Answer everybody. Nothing can come in any more: the door is closed before this is called."""
        with self._changed:
            waiting = list(self._inbox)
            self._inbox.clear()
        for item in waiting:
            if isinstance(item, _Replacement):
                item.done.set()
            else:
                self._end(item, FinishReason.FAILED, error)
        for request_id, queue in list(self._queues.items()):
            if not isinstance(error, EngineDeadError):
                self.machinery.scheduler.abort(request_id, FinishReason.FAILED)
            self._end(queue, FinishReason.FAILED, error)
        self._queues.clear()

    def after_fork_in_child(self) -> None:
        """The thread did not come along. Whoever waits here, or will, gets an error rather than a hang."""
        self._changed = threading.Condition()
        self._dead = EngineDeadError(
            "this process was forked from the one that runs the engine; uninstall and install again in the child"
        )
        self._thread = None
        queues = [*self._queues.values(), *(item for item in self._inbox if isinstance(item, OutputQueue))]
        for queue in queues:
            queue.reset_lock_after_fork()
            queue.close(FinishReason.FAILED, EngineDeadError(str(self._dead)))


def _ended_early(queue: OutputQueue, aborts: set[int]) -> FinishReason | None:
    if queue.request.request_id in aborts:
        return FinishReason.CANCELLED
    return FinishReason.TIMEOUT if has_passed(queue) else None


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
