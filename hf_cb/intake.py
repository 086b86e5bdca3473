"""Intake: where requests come in. The model in service, the thread that serves it, and who is told of what."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hf_cb.config import CBConfig, ResolvedConfig
from hf_cb.engine_core import EngineCore
from hf_cb.errors import (
    EngineClosedError,
    InvalidArgumentError,
    RequestTooLongError,
    UnsupportedCallError,
    UnsupportedModelError,
)
from hf_cb.handle import GenerationHandle, OutputQueue
from hf_cb.limits import QueueLimits
from hf_cb.options import Defaults, check_seed, make_request
from hf_cb.request import Request
from hf_cb.runtime.openmp import release_pool
from hf_cb.stats import Meter
from hf_cb.watch import RequestWatcher, tell_submitted
from hf_cb.worker import Worker


@dataclass(frozen=True, slots=True)
class Served:
    """A model in service: what the worker drives, and what a request is checked against."""

    core: EngineCore
    config: ResolvedConfig
    vocab_size: int
    max_positions: int | None  # that rows can share; None: no limit
    goes_beyond_positions: bool  # whether plain generate goes beyond them
    attention_backend: str
    attention_reason: str
    prefix_reason: str
    packed_bytes: int
    zeros_are_none: frozenset[str]  # arguments of generate() that mean nothing where they are all zeros
    defaults: Callable[[], Defaults] = field(repr=False)
    draw_seed: Callable[[], int] = field(repr=False)


class Intake:
    """What stands between the callers of one model and its engine's thread. Any thread may call it.

    A model that cannot be served has an intake without a worker: it counts the calls that run natively.
    """

    def __init__(
        self, served: Served | None, config: CBConfig, reason: str | None = None, refresh: Callable[[], None] = lambda: None
    ) -> None:
        """`reason`: why there is nothing `served`. `refresh`: brings it up to date with the model, or does nothing."""
        self.in_service = served  # or the last one of an engine that was shut down; None: there is none
        self.reason = reason
        self.refresh = refresh
        self._limits = QueueLimits(config.max_queue_size, config.queue_timeout)
        self._is_closed = False
        self.meter = Meter(config.record_steps)
        self._native_calls: Counter[str] = Counter()
        self._watchers: tuple[RequestWatcher, ...] = ()
        self._lock = threading.Lock()  # of these two
        self.worker: Worker | None = None
        if served is not None:
            self._start(served)

    def _start(self, served: Served) -> None:
        self.worker = Worker(served.core, self.meter, self._limits)
        # The thread holds the worker, not the intake: an engine nobody holds any more ends its thread. It may do so on that
        # thread itself: it must not wait.
        weakref.finalize(self, self.worker.close, timeout=0).atexit = False

    # -- requests ---------------------------------------------------------------------------------------------------------

    def make_requests(
        self, prompts: Sequence[Sequence[int] | Any], samples: int, seed: int | None, options: dict[str, Any]
    ) -> list[Request]:
        """Validated requests: so many samples of each prompt, next to each other, which share what is computed of it."""
        if not isinstance(samples, int) or samples < 1:
            raise InvalidArgumentError(f"samples: takes an integer >= 1; got {samples!r}")
        if seed is not None:
            check_seed(seed)
        served = self.served()
        requests: list[Request] = []
        for prompt in prompts:
            first = len(requests)
            for i in range(first, first + samples):
                own = options if seed is None else {**options, "seed": seed + i}
                request = make_request(prompt, own, served.defaults(), served.draw_seed)
                self.check(request)
                requests.append(request if i == first else replace(request, fork_of=requests[first].request_id))
        return requests

    def check(self, request: Request) -> None:
        """Refuse what could never be served: the ids, the model's positions, the block pool."""
        served = self.served()
        low, high = min(request.prompt), max(request.prompt)
        if low < 0 or high >= served.vocab_size:
            wrong = low if low < 0 else high
            raise InvalidArgumentError(f"input_ids: takes token ids from 0 to {served.vocab_size - 1}; got {wrong}")
        if served.max_positions is not None and request.max_tokens > served.max_positions:
            raise RequestTooLongError(
                f"max_new_tokens: a prompt of {len(request.prompt)} tokens and {request.max_new_tokens} new ones make "
                f"{request.max_tokens}; the model has {served.max_positions} positions"
            )
        for token, _ in request.sampling.logit_bias:
            if token >= served.vocab_size:
                raise InvalidArgumentError(f"logit_bias: takes token ids from 0 to {served.vocab_size - 1}; got {token}")
        served.core.scheduler.check_fits(request)

    def submit(self, requests: Sequence[Request]) -> list[GenerationHandle]:
        """Queue validated requests, all or none."""
        lockstep = self.served().core.lockstep
        if lockstep is not None and not lockstep.leads:
            raise UnsupportedCallError(f"rank {lockstep.rank} of {lockstep.size} follows: rank 0 takes the requests")
        worker = self.worker
        release_pool()
        watchers = self._watchers
        queues = [OutputQueue(request, tell_submitted(watchers, request) if watchers else ()) for request in requests]
        try:
            if worker is None:
                raise EngineClosedError("the engine takes no more requests")
            handles = [GenerationHandle(queue, worker) for queue in queues]  # first: whatever is raised from here on cancels
            worker.submit(queues)
        except EngineClosedError:
            self.served()  # if it is not the engine that was closed, but its model that can't be served any more: says so
            raise
        return handles

    def refuse_own_thread(self, name: str) -> None:
        """Raise UnsupportedCallError on the engine's own thread."""
        if self.worker is not None:
            self.worker.refuse_own_thread(name)

    @property
    def is_paused_by_caller(self) -> bool:
        """Whether the calling thread is inside of `with engine.pause()`."""
        return self.worker is not None and self.worker.is_paused_by_caller

    # -- the model in service ---------------------------------------------------------------------------------------------

    def served(self) -> Served:
        """The model in service. Raises EngineClosedError, or UnsupportedModelError with the reason why there is none."""
        if self._is_closed:
            raise EngineClosedError(
                "the engine was shut down and takes no more requests; hf_cb.uninstall(model) frees the model"
            )
        if self.in_service is None:
            raise UnsupportedModelError(f"this model cannot be served by the engine: {self.reason}")
        return self.in_service

    def serve(self, served: Served | None, reason: str | None = None) -> None:
        """Go on with a rebuilt twin (or without one): for what was submitted before, the old one still counts."""
        if served is not None and self.worker is not None:
            self.worker.replace(served.core)
        elif served is not None:
            self._start(served)
        self.in_service, self.reason = served, reason
        if served is None and self.worker is not None:
            worker, self.worker = self.worker, None
            worker.close(drain=True)

    @property
    def config(self) -> ResolvedConfig | None:
        """The settings in force; None for a model that cannot be served."""
        return self.in_service.config if self.in_service else None

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether other processes have parts of the model."""
        return self.in_service is not None and self.in_service.core.lockstep is not None

    @property
    def zeros_are_none(self) -> frozenset[str]:
        """Arguments of `generate()` that mean nothing to the model where they are all zeros."""
        return self.in_service.zeros_are_none if self.in_service else frozenset()

    def close(self, drain: bool) -> None:
        """Take no more requests and end the thread. With `drain`, finish what there is, else end it with EngineClosedError."""
        self._is_closed = True
        if self.worker is not None:
            self.worker.close(drain)

    @property
    def is_open(self) -> bool:
        """Whether it takes requests: it was not closed, and its thread has not died."""
        return not self._is_closed and self.worker is not None and self.worker.is_open

    # -- who is told ------------------------------------------------------------------------------------------------------

    def watch(self, watcher: RequestWatcher) -> None:
        """Let it be told of each request that is submitted from now on."""
        with self._lock:
            self._watchers = (*self._watchers, watcher)

    def unwatch(self, watcher: RequestWatcher) -> None:
        """Tell it of no more requests. Raises InvalidArgumentError if it does not watch."""
        with self._lock:
            if watcher not in self._watchers:
                raise InvalidArgumentError(f"watcher: takes one that watches this engine; got {watcher!r}")
            self._watchers = tuple(other for other in self._watchers if other is not watcher)

    def count_native(self, reason: str) -> None:
        """Note a call that ran plain generate, and why."""
        with self._lock:
            self._native_calls[reason] += 1

    def native_calls(self) -> dict[str, int]:
        """How many calls ran natively, by reason."""
        with self._lock:
            return dict(self._native_calls)
