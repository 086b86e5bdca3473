"""A request's output: the queue that the engine fills, and the handle that its caller holds.

A caller that waits for the end is woken once; one that streams is woken at each token; one that has not asked for anything
costs the engine an append.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hf_cb.blocking import block
from hf_cb.errors import HFCBError, InvalidArgumentError, RequestCancelledError, RequestTimeoutError
from hf_cb.request import FinishReason, Request, TokenLogprobs, TokenNote
from hf_cb.stats import RequestRecord
from hf_cb.watch import Watched


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What a request produced. Times are on `time.perf_counter()`'s clock, in seconds.

    `logprobs`: one for each of `tokens`; `prompt_logprobs`: one for each token of the prompt, None for the first, which nothing
    comes before. None for a request that did not ask for them.
    """

    request_id: int
    num_prompt_tokens: int
    tokens: tuple[int, ...]  # the output alone, an end-of-sequence token included
    finish_reason: FinishReason
    submitted_at: float
    first_token_at: float
    finished_at: float
    num_cached_tokens: int = 0  # of the prompt, that were in the KV cache already
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class OutputQueue:
    """One request's tokens, in order, and how it ended: exactly once. The engine thread writes, any thread reads."""

    def __init__(self, request: Request, watched: Watched = ()) -> None:
        self.request = request
        self.watched = watched
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.finish_reason: FinishReason | None = None
        self.admit_by: float | None = None  # on time.monotonic()'s clock; engine thread only, as are the next two
        self.admitted_at: float | None = None
        self.num_cached_tokens = 0
        self.submitted_at = time.perf_counter()
        self.first_token_at = self.last_token_at = self.finished_at = 0.0
        self._error: HFCBError | None = None
        self._make_lock()
        self._streaming = 0  # threads that wait for the next token rather than for the end
        self._tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def put(self, tokens: Sequence[int], notes: Sequence[TokenNote] = (), at: float | None = None) -> None:
        """Append tokens, which came `at` this moment of `time.perf_counter()`; None: now. Engine thread only."""
        with self._lock:
            self.logprobs += [note.logprobs for note in notes if note.logprobs is not None]
            for note in notes:
                if note.prompt_logprobs is not None:
                    self.prompt_logprobs = note.prompt_logprobs
            self.last_token_at = time.perf_counter() if at is None else at
            if not self.tokens:
                self.first_token_at = self.last_token_at
            self.tokens.extend(tokens)
            if self._streaming:
                self._changed.notify_all()
            self._wake_tasks()

    def settle(self, tokens: Sequence[int], at: float) -> None:
        """Take all tokens at once: those of the best beam of a search that has ended. Engine thread only."""
        with self._lock:
            self.first_token_at = self.last_token_at = at
            self.tokens.extend(tokens)

    def record(self, reason: FinishReason, error: HFCBError | None, at: float) -> RequestRecord:
        """What is to be told of it if it ends so, `at` this moment of `time.perf_counter()`. Engine thread only."""
        return RequestRecord(
            request=self.request,
            finish_reason=reason,
            error=None if error is None else str(error),
            num_output_tokens=len(self.tokens),
            num_cached_tokens=self.num_cached_tokens,
            submitted_at=self.submitted_at,
            admitted_at=self.admitted_at,
            first_token_at=self.first_token_at or None,
            finished_at=at,
        )

    def close(self, reason: FinishReason, error: HFCBError | None = None, at: float | None = None) -> None:
        """End it, `at` this moment of `time.perf_counter()`; None: now. The first call counts, later ones change nothing."""
        with self._lock:
            if self.finish_reason is not None:
                return
            self._changed.notify_all()  # they look when the lock is free; first, so that what raises here can be done again
            self._wake_tasks()
            self._error = error
            self.finished_at = time.perf_counter() if at is None else at
            self.finish_reason = reason

    def reset_lock_after_fork(self) -> None:
        """In a forked child the lock may be held by a thread that no longer exists."""
        self._make_lock()
        self._tasks = []

    def _make_lock(self) -> None:
        # A caller's thread takes the lock, not the condition, whose methods are Python's: an exception that is thrown into the
        # thread could end one between the lock and the `with` block, and leave it locked for the engine.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def _wake_tasks(self) -> None:
        for loop, future in self._tasks:
            # A loop that was closed has nobody left to wake.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_resolve, future)
        self._tasks.clear()

    def _ready(self, have: int | None) -> bool:
        return self.finish_reason is not None or (have is not None and len(self.tokens) > have)

    def wait(self, have: int | None = None, timeout: float | None = None) -> bool:
        """Block until there are more than `have` tokens (None: until the end), or it ended. False when the timeout ran out."""
        with self._lock:
            self._streaming += have is not None
            try:
                return block(lambda seconds: self._changed.wait_for(lambda: self._ready(have), seconds), timeout)
            finally:
                self._streaming -= have is not None

    async def wait_async(self, have: int | None = None) -> None:
        """The same in an event loop, without a thread."""
        while True:
            with self._lock:
                if self._ready(have):
                    return
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self._tasks.append((loop, future))
            await future

    def raise_if_failed(self) -> None:
        """Raise what this request ended with, if that was no result: a new exception for every caller, the cause chained."""
        request_id = self.request.request_id
        if self._error is not None:
            raise type(self._error)(*self._error.args) from self._error.__cause__
        if self.finish_reason is FinishReason.CANCELLED:
            raise RequestCancelledError(f"request {request_id} was cancelled after {len(self.tokens)} tokens")
        if self.finish_reason is FinishReason.TIMEOUT:
            raise RequestTimeoutError(f"timeout: request {request_id} reached its deadline after {len(self.tokens)} tokens")

    def result(self) -> GenerationResult:
        """The result of a request that ended, or its error."""
        self.raise_if_failed()
        assert self.finish_reason is not None
        return GenerationResult(
            self.request.request_id,
            len(self.request.prompt),
            tuple(self.tokens),
            self.finish_reason,
            self.submitted_at,
            self.first_token_at,
            self.finished_at,
            self.num_cached_tokens,
            None if self.request.logprobs is None else tuple(self.logprobs),
            self.prompt_logprobs,
        )


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class RequestOwner(Protocol):
    """What a handle needs of the worker, which answers its request."""

    def abort(self, request_id: int) -> None:
        """Cancel a request."""

    def forget(self, request_id: int) -> None:
        """Cancel a request without taking a lock."""

    def refuse_own_thread(self, name: str) -> None:
        """Raise UnsupportedCallError on the thread that would have to answer: waiting there would never end."""


class GenerationHandle:
    """What `Engine.submit` returns: iterate it for the tokens, `await` it or call `result()` for the whole, `cancel()` it.

    A handle that is dropped before its request ended cancels the request: nobody could read it any more.
    """

    def __init__(self, queue: OutputQueue, owner: RequestOwner) -> None:
        self._queue = queue
        self._owner = owner
        # `forget` must not take a lock: the collector may run it on any thread, at any point.
        self._dropped = weakref.finalize(self, owner.forget, queue.request.request_id)
        self._dropped.atexit = False

    @property
    def request_id(self) -> int:
        """The request's number, unique in this process."""
        return self._queue.request.request_id

    @property
    def done(self) -> bool:
        """Whether it ended, in whatever way."""
        return self._queue.finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """How it ended; None while it runs."""
        return self._queue.finish_reason

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens so far, also of a request that failed."""
        return tuple(self._queue.tokens)

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of the tokens so far, for a request that asked for them: of no fewer than `tokens` had before this was read."""
        return tuple(self._queue.logprobs)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """Of the prompt's tokens, once there is an output token, for a request that asked for them."""
        return self._queue.prompt_logprobs

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt, that were in the KV cache when it was last admitted."""
        return self._queue.num_cached_tokens

    def cancel(self) -> None:
        """Ask the engine to stop it at the next step; from any thread, in any state. One that has ended stays as it is."""
        if not self.done:
            self._owner.abort(self.request_id)

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the end.

        Raises RequestTimeoutError when `timeout` seconds ran out (the request goes on), else what the request ended with:
        RequestCancelledError, RequestTimeoutError, RequestFailedError, EngineClosedError, EngineDeadError. A waiter that is
        interrupted (Ctrl-C) cancels the request.
        """
        if timeout is not None and not (isinstance(timeout, (int, float)) and 0 <= timeout <= threading.TIMEOUT_MAX):
            raise InvalidArgumentError(f"timeout: takes seconds >= 0, at most {threading.TIMEOUT_MAX:.0f}; got {timeout!r}")
        self._refuse_own_thread("result")
        try:
            ended = self._queue.wait(timeout=timeout)
        except BaseException:
            self.cancel()
            raise
        if not ended:
            raise RequestTimeoutError(f"timeout: request {self.request_id} has not ended after {timeout} s")
        return self._queue.result()

    def __iter__(self) -> Iterator[int]:
        """Each token as it comes, from the first. Raises as `result()` does."""
        taken = 0
        while True:
            self._refuse_own_thread("iteration")
            try:
                self._queue.wait(have=taken)
            except BaseException:
                self.cancel()
                raise
            fresh = self._queue.tokens[taken:]
            if not fresh and self.done:
                self._queue.raise_if_failed()
                return
            taken += len(fresh)
            yield from fresh

    def _refuse_own_thread(self, name: str) -> None:
        if not self.done:
            self._owner.refuse_own_thread(name)

    async def __aiter__(self) -> AsyncIterator[int]:
        """Each token as it comes; cancelling the task cancels the request."""
        taken = 0
        while True:
            await self._wait_or_cancel(taken)
            fresh = self._queue.tokens[taken:]
            if not fresh and self.done:
                self._queue.raise_if_failed()
                return
            taken += len(fresh)
            for token in fresh:
                yield token

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        """The result; cancelling the task cancels the request."""
        yield from self._wait_or_cancel(None).__await__()
        return self._queue.result()

    async def _wait_or_cancel(self, have: int | None) -> None:
        try:
            await self._queue.wait_async(have)
        except asyncio.CancelledError:
            self.cancel()
            raise
