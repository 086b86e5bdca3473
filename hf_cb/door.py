"""Door: how other threads reach the engine's thread. Its rules:

* Checking that the engine is open, putting a request in and waking the thread are one critical section, and closing takes
  the same lock: a request that got in is always answered, one that did not raises on its caller's thread.
* Aborts and deadlines take effect between two steps.
* The thread starts with the first request and is a daemon; it is joined at shutdown and at interpreter exit.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hf_cb.blocking import block
from hf_cb.engine_core import EngineCore
from hf_cb.errors import EngineClosedError, EngineDeadError, EngineOverloadedError, UnsupportedCallError
from hf_cb.handle import OutputQueue
from hf_cb.limits import QueueLimits
from hf_cb.stats import Meter


@dataclass(slots=True)
class Replacement:
    """A barrier in the inbox: what came before ends on the old core, what comes after starts on the new."""

    core: EngineCore
    done: threading.Event


class Door(ABC):
    """What any thread may call. Behind it, `_run` is the engine's thread."""

    def __init__(self, core: EngineCore, meter: Meter, limits: QueueLimits | None = None) -> None:
        """`meter`: the engine's, which outlives a worker; nobody else writes to it while this one lives."""
        self.core = core
        self._limits = limits or QueueLimits()
        self._meter = meter
        self._make_lock()
        # Guarded by _lock:
        self._inbox: deque[OutputQueue | Replacement] = deque()
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

    def _make_lock(self) -> None:
        self._lock = threading.RLock()  # what `with` takes: as in OutputQueue, not the condition
        self._changed = threading.Condition(self._lock)

    @abstractmethod
    def _run(self) -> None:
        """Answer what comes in, until it is closed."""

    @abstractmethod
    def _park(self) -> None:
        """A pause holds: give the KV memory back, if so wanted, and tell those who wait for it. With the lock held."""

    def submit(self, queues: Sequence[OutputQueue]) -> None:
        """Take in, all or none. Raises EngineClosedError, EngineDeadError, EngineOverloadedError; on the worker itself
        UnsupportedCallError."""
        self.refuse_own_thread("submit")
        with self._lock:
            self._check_open()
            load = self.core.load
            num_new = sum(queue.request.width for queue in queues)
            try:
                self._limits.check(num_new, len(self._inbox) + load.waiting, load.running, load.seats)
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
            self._inbox.append(Replacement(core, done))
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


def _join(thread: threading.Thread, seconds: float) -> bool:
    thread.join(seconds)
    return not thread.is_alive()
