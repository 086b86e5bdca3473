"""InOrder: calls made on threads of their own, a bounded number at a time, with their outcomes in the order of what came in."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from hf_cb.blocking import block
from hf_cb.hf.calls.background import BackgroundCall, seed_at
from hf_cb.hf.calls.surroundings import Surroundings

T = TypeVar("T")
R = TypeVar("R")


class InOrder(Generic[T, R]):
    """An iterator over `answer(item)` for each item, begun at the first `next`.

    At most `limit` items have been read and not been handed out. Reading has a thread of its own: an item that is long in
    coming, from a queue or the net, holds up no result. What `items` or `answer` raise is raised in its place. Nothing goes on
    once nobody holds this. The calls' own seeds follow from `seed`; their surroundings are those of the first `next`.
    """

    def __init__(self, items: Iterator[T], answer: Callable[[T], R], limit: int, seed: int) -> None:
        self._flow = _Flow(items, answer, limit, seed)
        self._ended = False
        self.was_interrupted = False  # the latest `next`: what it raised is no outcome of a call
        weakref.finalize(self, self._flow.close).atexit = False

    def __iter__(self) -> InOrder[T, R]:
        return self

    def __next__(self) -> R:
        if self._ended:
            raise StopIteration
        self._flow.start()
        self.was_interrupted = True
        future = self._flow.wait()
        self.was_interrupted = False
        if future is None:
            self._ended = True
            raise StopIteration
        return future.result()

    def close(self) -> None:
        """Cancel what runs and read no more."""
        self._ended = True
        self._flow.close()


class _Flow(Generic[T, R]):
    """The state that the threads share. They don't hold the iterator, so that its end can be theirs."""

    def __init__(self, items: Iterator[T], answer: Callable[[T], R], limit: int, seed: int) -> None:
        self._items: Iterator[T] | None = items
        self._answer = answer
        self._seed = seed
        self._calls: set[BackgroundCall] = set()
        self._is_closed = False
        # No locks: `close` may be run by the garbage collector, on a thread that holds one. These queues allow for that.
        self.room: SimpleQueue[None] = SimpleQueue()
        for _ in range(limit):
            self.room.put(None)
        self.underway: SimpleQueue[tuple[Future[R], BackgroundCall] | None] = SimpleQueue()
        self._feeder: _Thread | None = None
        _flows.add(self)

    def start(self) -> None:
        if self._feeder is None:
            self._surroundings = Surroundings()
            self._feeder = _Thread(self._surroundings.copy().run, self._feed, grace=_FEEDER_GRACE)
            self._feeder.start()

    def wait(self) -> Future[R] | None:
        """The next call, which has ended; None: there is none. Who is interrupted gives up that call, and none after it."""
        taken: list[tuple[Future[R], BackgroundCall] | None] = []

        def take(seconds: float) -> bool:
            with contextlib.suppress(Empty):
                taken.append(self.underway.get(timeout=seconds))
            return bool(taken)

        block(take)
        if taken[0] is None:
            return None
        future, call = taken[0]
        ended = threading.Event()
        future.add_done_callback(lambda _: ended.set())
        try:
            block(ended.wait)
        except BaseException:
            call.cancel()
            raise
        finally:
            self.room.put(None)
        return future

    def close(self) -> None:
        self._is_closed = True
        self.room.put(None)  # the feeder may wait there
        for call in list(self._calls):
            call.cancel()

    def _feed(self) -> None:
        items, self._items = self._items, None
        assert items is not None
        place = 0
        while True:
            self.room.get()
            if self._is_closed or not self._send(items, place):
                break
            place += 1
        self.underway.put(None)

    def _send(self, items: Iterator[T], place: int) -> bool:
        """Read one item and start its call. False: there is none."""
        future: Future[R] = Future()
        call = BackgroundCall(seed_at(self._seed, place))
        try:
            item = next(items)
            self._calls.add(call)
            _Thread(self._surroundings.copy().run, self._run, future, item, call, grace=_GRACE).start()
        except StopIteration:
            return False
        except BaseException as error:  # no thread to be had, for one
            future.set_exception(error)
        self.underway.put((future, call))
        return True

    def _run(self, future: Future[R], item: T, call: BackgroundCall) -> None:
        try:
            if self._is_closed:  # else `close` is still to come, and will find this call
                call.cancel()
            with call.underway():
                future.set_result(self._answer(item))
        except BaseException as error:
            future.set_exception(error)
        finally:
            self._calls.discard(call)


class _Thread(threading.Thread):
    """A daemon: at the interpreter's exit nobody waits for results that nobody will read. `grace`: seconds that it has then."""

    def __init__(self, target: Callable[..., None], *args: Any, grace: float) -> None:
        super().__init__(target=target, args=args, name="hf_cb-pipeline", daemon=True)
        self.grace = grace


_flows: weakref.WeakSet[_Flow[Any, Any]] = weakref.WeakSet()
_GRACE, _FEEDER_GRACE = 10.0, 0.5  # seconds: the latter waits for an item, and may do so for ever


def _close_flows() -> None:
    for flow in list(_flows):
        flow.close()
    # A daemon that the interpreter's end finds in foreign code, a torch operation say, takes the process down with it. That is
    # so until its very end, long after its result was handed out: a thread frees what it was called with.
    began = time.monotonic()
    for thread in threading.enumerate():
        if isinstance(thread, _Thread):
            thread.join(max(0.0, began + thread.grace - time.monotonic()))


atexit.register(_close_flows)
