"""Engine: the public face of a running backend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hf_cb.config import ResolvedConfig
from hf_cb.errors import InvalidArgumentError, UnsupportedCallError
from hf_cb.handle import GenerationHandle, GenerationResult
from hf_cb.intake import Intake
from hf_cb.stats import EngineStats, StepRecord
from hf_cb.watch import RequestWatcher


class Engine:
    """Continuous batching for one model. Every method may be called from any thread.

    An engine whose model cannot be served takes no requests of its own (`submit` raises UnsupportedModelError with the
    reason), but counts the calls that ran natively.
    """

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

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
        self._intake.refuse_own_thread("submit")
        self._intake.refresh()
        return self._intake.submit(self._intake.make_requests(list(prompts), samples, options.pop("seed", None), options))

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

    def follow(self) -> None:
        """Rank 1 and up of a tensor-parallel model: compute what rank 0 schedules, until its engine is shut down.

        Raises EngineDeadError when that engine dies, or a rank is lost.
        """
        core = self._intake.served().core
        if core.lockstep is None or core.lockstep.leads:
            raise UnsupportedCallError("follow: is for the ranks other than 0 of a tensor-parallel model")
        core.follow()

    def stats(self) -> EngineStats:
        """Counters since the engine was made, and what it is doing now."""
        intake = self._intake
        served, core, reason = intake.in_service, None if intake.worker is None else intake.worker.core, intake.reason or ""
        load = None if core is None else core.load
        graphs, graph_reason = (0, reason) if core is None else core.graphs
        return EngineStats(
            **intake.meter.totals(),
            running=load.running if load else 0,
            waiting=load.waiting if load else 0,
            blocks_used=load.blocks_used if load else 0,
            num_blocks=core.cache.num_blocks if core else 0,
            native_calls=intake.native_calls(),
            attention_backend=served.attention_backend if served else "none",
            attention_reason=served.attention_reason if served else reason,
            packed_bytes=served.packed_bytes if served else 0,
            graphs=graphs,
            graph_reason=graph_reason,
            prefix_reason=served.prefix_reason if served else reason,
            max_running=served.config.max_batch_size if served else 0,
        )

    def steps(self) -> list[StepRecord]:
        """The latest `CBConfig.record_steps` steps, oldest first."""
        while True:
            try:
                return list(self._intake.meter.records)
            except RuntimeError:  # the engine thread appended while we copied: copy again
                continue

    def watch(self, watcher: RequestWatcher) -> None:
        """Let it be told of each request that is submitted from now on, when it comes and when it has ended."""
        self._intake.watch(watcher)

    def unwatch(self, watcher: RequestWatcher) -> None:
        """Tell it of no more requests; those that it has seen come, it sees end. Raises InvalidArgumentError if it is none."""
        self._intake.unwatch(watcher)

    @contextlib.contextmanager
    def pause(self, release_kv: bool = False) -> Iterator[None]:
        """Sole use of the model: inside the block no step runs. Requests may come in; they wait.

        The prefix cache is empty afterwards: the weights may be others. With `release_kv`, the KV cache's memory is free
        inside, and taken again by the next step; what was running then computes its keys and values again. If it can't be
        taken again, the engine dies of it.
        """
        worker = self._intake.worker
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
        if self._intake.worker is not None:
            self._intake.worker.forget_prefixes()

    def shutdown(self, drain: bool = True) -> None:
        """Take no more requests and end the thread. With `drain`, finish what there is, else end it with EngineClosedError."""
        self._intake.close(drain)

    @property
    def max_tokens(self) -> int:
        """The most tokens that a prompt and its output may have together: what the model's positions and the KV cache hold."""
        served = self._intake.served()
        room = served.core.max_tokens
        return room if served.max_positions is None else min(room, served.max_positions)

    @property
    def is_open(self) -> bool:
        """Whether it takes requests: it was not shut down, and has not died."""
        return self._intake.is_open

    @property
    def config(self) -> ResolvedConfig | None:
        """The settings in force; None for a model that cannot be served."""
        return self._intake.config

    @property
    def unsupported_reason(self) -> str | None:
        """Why the model cannot be served, or None."""
        return self._intake.reason

    @property
    def unserved_options(self) -> tuple[str, ...]:
        """Options that the model's generation_config sets and `submit` has no form of: `model.generate()` serves them."""
        return self._intake.served().defaults().unserved
