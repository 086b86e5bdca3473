"""Engine: the public face of a running backend."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from hf_cb.handle import GenerationHandle, GenerationResult, OutputQueue
from hf_cb.limits import QueueLimits
from hf_cb.options import Defaults, check_seed, make_request
from hf_cb.request import Request
from hf_cb.runtime.openmp import release_pool
from hf_cb.stats import EngineStats, Meter, StepRecord
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


class Engine:
    """Continuous batching for one model. Every method may be called from any thread.

    An engine whose model cannot be served takes no requests of its own (`submit` raises UnsupportedModelError with the
    reason), but counts the calls that ran natively.
    """

    def __init__(
        self,
        served: Served | None,
        config: CBConfig,
        reason: str | None = None,
        refresh: Callable[[], Callable[[], None] | None] = lambda: None,
    ) -> None:
        """`refresh`: a weak reference to what brings `served` up to date with the model."""
        self._served = served
        self._reason = reason
        self._refresh = refresh
        self._limits = QueueLimits(config.max_queue_size, config.queue_timeout)
        self._closed = False
        self._meter = Meter(config.record_steps)
        self._native_calls: Counter[str] = Counter()
        self._watchers: tuple[RequestWatcher, ...] = ()
        self._lock = threading.Lock()  # of these two
        self._worker: Worker | None = None
        if served is not None:
            self._start(served)

    def _start(self, served: Served) -> None:
        self._worker = Worker(served.core, self._meter, self._limits)
        # The thread holds the worker, not the engine: an engine nobody holds any more ends its thread.
        weakref.finalize(self, _close_quietly, self._worker).atexit = False

    # -- requests ---------------------------------------------------------------------------------------------------------

    def submit(self, input_ids: Sequence[int] | Any, **options: Any) -> GenerationHandle:
        """Queue one prompt and return at once.

        `input_ids`: token ids, a sequence of ints or a tensor of shape [n] or [1, n], n >= 1. Options: max_new_tokens,
        eos_token_id (an int, a sequence, or None for none), do_sample, temperature, top_k, top_p, min_p, logit_bias (a mapping
        from token ids to what is added to their logits), repetition_penalty, frequency_penalty and presence_penalty (taken
        off the logits of the output's tokens, for each time that they came and once), min_new_tokens, suppress_tokens,
        begin_suppress_tokens, seed, timeout (seconds until the request ends with RequestTimeoutError), priority (lower is
        sooner) and tenant (for the policies "priority" and "fair"), cache_salt (keys and values are shared only between
        requests with the same one), logprobs and prompt_logprobs (so many of the most probable tokens at each place of the
        output and of the prompt, in the result; 0: only the token itself). What is left out comes from the model's
        generation_config; a seed from torch's generator on the calling thread.

        Raises InvalidArgumentError, RequestTooLongError, EngineOverloadedError, UnsupportedModelError, EngineClosedError or
        EngineDeadError; if it does not raise, the handle resolves exactly once.
        """
        if "samples" in options:
            raise InvalidArgumentError("samples: submit gives one handle; submit_batch([input_ids], samples=...) gives as many")
        return self.submit_batch([input_ids], **options)[0]

    def submit_batch(self, prompts: Iterable[Sequence[int] | Any], samples: int = 1, **options: Any) -> list[GenerationHandle]:
        """Queue many prompts, all or none, and so many samples of each, which share what is computed of their prompt.

        The handles are in the order of the prompts, the samples of one next to each other. A `seed` counts for the first of
        all; the others take the following numbers. Otherwise as `submit`.
        """
        if not isinstance(samples, int) or samples < 1:
            raise InvalidArgumentError(f"samples: takes an integer >= 1; got {samples!r}")
        self._follow_model()
        seed = options.pop("seed", None)
        if seed is not None:
            check_seed(seed)
        requests: list[Request] = []
        for prompt in prompts:
            first = len(requests)
            for i in range(first, first + samples):
                request = self.make_request(prompt, seed=None if seed is None else seed + i, **options)
                requests.append(request if i == first else replace(request, fork_of=requests[first].request_id))
        return self.submit_all(requests)

    def generate_batch(self, prompts: Iterable[Sequence[int] | Any], **options: Any) -> list[GenerationResult]:
        """The results of many prompts, in their order; the rest as `submit_batch`.

        The first error is raised, and the requests that have not ended are cancelled.
        """
        handles = self.submit_batch(prompts, **options)
        try:
            return [handle.result() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise

    def make_request(self, input_ids: Sequence[int] | Any, **options: Any) -> Request:
        """Validate one prompt with its options. The same errors as `submit`, before anything is queued."""
        served = self.served()
        request = make_request(input_ids, options, served.defaults(), served.draw_seed)
        self.check(request)
        return request

    def _follow_model(self) -> None:
        self.refuse_own_thread("submit")
        refresh = self._refresh()
        if refresh is not None:
            refresh()

    def refuse_own_thread(self, name: str) -> None:
        """Raise UnsupportedCallError on the engine's own thread."""
        if self._worker is not None:
            self._worker.refuse_own_thread(name)

    @property
    def is_paused_by_caller(self) -> bool:
        """Whether the calling thread is inside of `with engine.pause()`."""
        return self._worker is not None and self._worker.is_paused_by_caller

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether other processes have parts of the model."""
        return self._served is not None and self._served.core.lockstep is not None

    def follow(self) -> None:
        """Rank 1 and up of a tensor-parallel model: compute what rank 0 schedules, until its engine is shut down.

        Raises EngineDeadError when that engine dies, or a rank is lost.
        """
        lockstep = self.served().core.lockstep
        if lockstep is None or lockstep.leads:
            raise UnsupportedCallError("follow: is for the ranks other than 0 of a tensor-parallel model")
        self.served().core.follow()

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

    def submit_all(self, requests: Sequence[Request]) -> list[GenerationHandle]:
        """Queue validated requests, all or none."""
        lockstep = self.served().core.lockstep
        if lockstep is not None and not lockstep.leads:
            raise UnsupportedCallError(f"rank {lockstep.rank} of {lockstep.size} follows: rank 0 takes the requests")
        worker = self._worker
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

    # -- operation --------------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters since the engine was made, and what it is doing now."""
        served, worker, meter = self._served, self._worker, self._meter
        with self._lock:
            native = dict(self._native_calls)
        core = None if worker is None else worker.core
        graphs = None if core is None else core.runner.graphs
        return EngineStats(
            running=core.scheduler.num_running if core else 0,
            waiting=core.scheduler.num_waiting if core else 0,
            steps=meter.steps,
            prompt_tokens=meter.prompt_tokens,
            output_tokens=meter.output_tokens,
            preemptions=meter.preemptions,
            swaps=meter.swaps,
            finished=dict(meter.finished),
            num_blocks=core.cache.num_blocks if core else 0,
            blocks_used=core.scheduler.memory.blocks_used if core else 0,
            step_seconds=meter.step_seconds,
            model_seconds=meter.model_seconds,
            mean_batch_size=meter.rows / max(1, meter.steps),
            kv_waste=meter.waste_sum / max(1, meter.steps),
            prefix_hits=meter.prefix_hits,
            cached_tokens=meter.cached_tokens,
            native_calls=native,
            attention_backend=served.attention_backend if served else "none",
            attention_reason=served.attention_reason if served else self._reason or "",
            packed_bytes=served.packed_bytes if served else 0,
            graphs=graphs.count if graphs is not None else 0,
            graph_reason=graphs.reason if graphs is not None else self._reason or "none were asked for",
            prefix_reason=served.prefix_reason if served else self._reason or "",
            admitted_tokens=meter.admitted_tokens,
            rejected=meter.rejected,
            max_running=served.config.max_batch_size if served else 0,
            distributions=meter.distributions(),
        )

    def steps(self) -> list[StepRecord]:
        """The latest `CBConfig.record_steps` steps, oldest first."""
        while True:
            try:
                return list(self._meter.records)
            except RuntimeError:  # the engine thread appended while we copied: copy again
                continue

    def watch(self, watcher: RequestWatcher) -> None:
        """Let it be told of each request that is submitted from now on, when it comes and when it has ended."""
        with self._lock:
            self._watchers = (*self._watchers, watcher)

    def unwatch(self, watcher: RequestWatcher) -> None:
        """Tell it of no more requests; those that it has seen come, it sees end. Raises InvalidArgumentError if it is none."""
        with self._lock:
            if watcher not in self._watchers:
                raise InvalidArgumentError(f"watcher: takes one that watches this engine; got {watcher!r}")
            self._watchers = tuple(other for other in self._watchers if other is not watcher)

    @contextlib.contextmanager
    def pause(self, release_kv: bool = False) -> Iterator[None]:
        """Sole use of the model: inside the block no step runs. Requests may come in; they wait.

        The prefix cache is empty afterwards: the weights may be others. With `release_kv`, the KV cache's memory is free
        inside, and taken again by the next step; what was running then computes its keys and values again. If it can't be
        taken again, the engine dies of it.
        """
        worker = self._worker
        if worker is None:
            yield
            return
        worker.pause(release_kv)
        try:
            yield
        finally:
            worker.resume()

    def reset_prefix_cache(self) -> None:
        """Let no request that is submitted from now on begin with keys and values that were computed before.

        The engine does so by itself after a pause, and when it finds weights changed in place. It may miss a write through
        `.data`, or through memory shared with something else, that spares most of a weight.
        """
        if self._worker is not None:
            self._worker.forget_prefixes()

    def shutdown(self, drain: bool = True) -> None:
        """Take no more requests and end the thread. With `drain`, finish what there is, else end it with EngineClosedError."""
        self._closed = True
        if self._worker is not None:
            self._worker.close(drain)

    @property
    def max_tokens(self) -> int:
        """The most tokens that a prompt and its output may have together: what the model's positions and the KV cache hold."""
        served = self.served()
        room = served.core.scheduler.memory.max_tokens
        return room if served.max_positions is None else min(room, served.max_positions)

    @property
    def is_open(self) -> bool:
        """Whether it takes requests: it was not shut down, and has not died."""
        return not self._closed and self._worker is not None and self._worker.is_open

    @property
    def config(self) -> ResolvedConfig | None:
        """The settings in force; None for a model that cannot be served."""
        return self._served.config if self._served else None

    @property
    def zeros_are_none(self) -> frozenset[str]:
        """Arguments of `generate()` that mean nothing to the model where they are all zeros."""
        return self._served.zeros_are_none if self._served else frozenset()

    @property
    def unsupported_reason(self) -> str | None:
        """Why the model cannot be served, or None."""
        return self._reason

    def serve(self, served: Served | None, reason: str | None = None) -> None:
        """Go on with a rebuilt twin (or without one): for what was submitted before, the old one still counts."""
        if served is not None and self._worker is not None:
            self._worker.replace(served.core)
        elif served is not None:
            self._start(served)
        self._served, self._reason = served, reason
        if served is None and self._worker is not None:
            worker, self._worker = self._worker, None
            worker.close(drain=True)

    def count_native(self, reason: str) -> None:
        """Note a call that ran plain generate, and why."""
        with self._lock:
            self._native_calls[reason] += 1

    def served(self) -> Served:
        """The model in service. Raises EngineClosedError, or UnsupportedModelError with the reason why there is none."""
        if self._closed:
            raise EngineClosedError(
                "the engine was shut down and takes no more requests; hf_cb.uninstall(model) frees the model"
            )
        if self._served is None:
            raise UnsupportedModelError(f"this model cannot be served by the engine: {self._reason}")
        return self._served


def _close_quietly(worker: Worker) -> None:
    # Runs in a finalizer, maybe on the worker's own thread: it must not wait.
    worker.close(drain=True, timeout=0)
