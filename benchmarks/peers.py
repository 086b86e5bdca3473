"""The peers: ways to serve one model to many callers, each `run(model, workload, progress, ...) -> Outcome`.

All are greedy, ignore end-of-sequence tokens (see `ignore_end_of_sequence`) and give every request exactly its forced number
of tokens. What a peer sets up once per process (the engine, the paged cache) is not in its wall time.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.streamers import BaseStreamer

import hf_cb
from benchmarks.outcome import Outcome, Row
from benchmarks.workload import Item, Workload

Progress = Callable[[int], object]  # told how many more output tokens are done
Timed = tuple[tuple[int, ...], tuple[float, ...]]  # tokens and their times

STATIC_BATCH = 16
_PAGE_SIZE = 64  # generate_batch: its default of 256 wastes more memory and is no faster here
_MAX_BATCH_TOKENS = 512  # generate_batch: its dense mask costs batch tokens x cached tokens, so larger steps are slower
ALL_STEPS = 1_000_000


def ignore_end_of_sequence(model: Any) -> None:
    """Make plain greedy search without any stop the model's own default, for every peer alike."""
    pad = model.generation_config.pad_token_id
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0 if pad is None else pad)


def locked(model: Any, workload: Workload, progress: Progress, concurrency: int) -> Outcome:
    """What people do today: threads that call plain `generate` behind a lock."""

    def call(item: Item) -> Timed:
        clock = _Clock(lambda _: progress(1))
        output = model.generate(**inputs(model, item), max_new_tokens=item.output_length, streamer=clock)
        return _new_tokens(output, item), tuple(clock.times)

    with installed(model, backend="serialized"):
        rows, wall = _serve(workload, concurrency, call)
    # A dynamic cache holds exactly the tokens of the one call.
    return Outcome(tuple(rows), wall, steps=workload.output_tokens, kv_waste=0.0)


def static(model: Any, workload: Workload, progress: Progress, concurrency: int) -> Outcome:
    """Plain `generate` over left-padded batches of 16 of those that wait; a batch runs to its longest row."""
    waiting, rows, held, useful, steps = list(workload.items), [], 0, 0, 0
    start = time.perf_counter()
    while waiting:
        _sleep_until(start + waiting[0].arrival)
        elapsed = time.perf_counter() - start
        batch = [item for item in waiting[: min(STATIC_BATCH, concurrency)] if item.arrival <= elapsed]
        del waiting[: len(batch)]
        width = max(len(item.prompt) for item in batch)
        longest = max(item.output_length for item in batch)
        clock = _Clock(lambda step, batch=batch: progress(sum(item.output_length > step for item in batch)))
        output = model.generate(**_left_padded(model, batch, width), max_new_tokens=longest, streamer=clock)
        for item, tokens in zip(batch, output[:, width:].tolist(), strict=True):
            length = item.output_length
            rows.append(Row(item, start + item.arrival, tuple(tokens[:length]), tuple(clock.times[:length])))
            useful += sum(len(item.prompt) + step for step in range(length))
        held += len(batch) * sum(width + step for step in range(longest))
        steps += longest
    wall = time.perf_counter() - start
    return Outcome(tuple(rows), wall, steps, kv_waste=1 - useful / held, notes=f"batches of {STATIC_BATCH}, left padded")


def generate_batch(
    model: Any, workload: Workload, progress: Progress, concurrency: int, attention: str | None = None
) -> Outcome:
    """transformers' own continuous batching, through the manager that its `generate_batch` uses, for lengths per request.

    It runs on a copy of the model, since it changes the model's configuration.
    """
    model = copy.deepcopy(model)
    if attention is not None:
        model.set_attn_implementation(attention)
    manager = model.init_continuous_batching(model.generation_config, _manager_config(workload, model.device))
    manager.warmup()
    manager.start()
    results: dict[int, Any] = {}
    sent: dict[int, float] = {}
    waiting = list(workload.items)
    try:
        start = time.perf_counter()
        while len(results) < len(workload.items):
            while waiting and len(sent) - len(results) < concurrency and start + waiting[0].arrival <= time.perf_counter():
                _add(manager, item := waiting.pop(0))
                sent[item.index] = time.perf_counter()
            until_next = start + waiting[0].arrival - time.perf_counter() if waiting else 1.0
            result = manager.get_result(timeout=max(0.001, min(1.0, until_next)))
            if result is not None:
                if result.error is not None:
                    raise RuntimeError(f"generate_batch: request {result.request_id} failed: {result.error}")
                results[int(result.request_id)] = result
                progress(len(result.generated_tokens))
            elif not manager.is_running():
                raise RuntimeError("generate_batch: its thread ended before its requests")
        wall = time.perf_counter() - start
    finally:
        manager.stop(block=True)
        manager.destroy()
    rows = tuple(
        Row(item, sent[item.index], tuple(results[item.index].generated_tokens), tuple(results[item.index].timestamps))
        for item in workload.items
    )
    config = manager.continuous_batching_config
    notes = (
        f"attention {model.config._attn_implementation}, page_size {config.page_size}, num_blocks {config.num_blocks}, "
        f"max_batch_tokens {config.max_batch_tokens}"
    )
    return Outcome(rows, wall, manager.current_batch, kv_waste=_paged_waste(workload, config.page_size), notes=notes)


def generate_batch_flash(model: Any, workload: Workload, progress: Progress, concurrency: int) -> Outcome:
    """The same with flash-attn, on a GPU where that is installed."""
    return generate_batch(model, workload, progress, concurrency, attention="flash_attention_2")


def hf_cb_generate(model: Any, workload: Workload, progress: Progress, concurrency: int, **options: Any) -> Outcome:
    """This package: threads that call `model.generate`."""
    with installed(model, record_steps=ALL_STEPS, **options) as engine:
        rows, wall = serve_by_generate(model, workload, progress, concurrency)
    return with_step_times(engine, rows, wall)


def hf_cb_submit(model: Any, workload: Workload, progress: Progress, concurrency: int, **options: Any) -> Outcome:
    """This package: `engine.submit`, from as many threads."""
    with installed(model, record_steps=ALL_STEPS, **options) as engine:

        def call(item: Item) -> Timed:
            tokens = engine.submit(item.prompt, max_new_tokens=item.output_length).result().tokens
            progress(len(tokens))
            return tokens, ()

        rows, wall = _serve(workload, concurrency, call)
    return with_step_times(engine, rows, wall)


PEERS: Mapping[str, Callable[..., Outcome]] = {
    "locked": locked,
    "static": static,
    "generate_batch": generate_batch,
    "generate_batch_flash": generate_batch_flash,
    "hf_cb": hf_cb_generate,
    "hf_cb_submit": hf_cb_submit,
}


class _Clock(BaseStreamer):
    """Notes when each step's tokens came, and tells `on_step` which step it was."""

    def __init__(self, on_step: Callable[[int], object]) -> None:
        self.times: list[float] = []
        self._on_step = on_step
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.times.append(time.perf_counter())
        self._on_step(len(self.times) - 1)

    def end(self) -> None:
        pass


class installed:
    """`install` for the body; on leaving, `uninstall`, so that the last step is on record."""

    def __init__(self, model: Any, **options: Any) -> None:
        self._model, self._options = model, options

    def __enter__(self) -> Any:
        return hf_cb.install(self._model, **self._options)

    def __exit__(self, *_: object) -> None:
        hf_cb.uninstall(self._model)


def serve_by_generate(model: Any, workload: Workload, progress: Progress, concurrency: int) -> tuple[list[Row], float]:
    """Rows without times, and the wall seconds, of threads that call the `generate` that is installed."""

    def call(item: Item) -> Timed:
        tokens = _new_tokens(model.generate(**inputs(model, item), max_new_tokens=item.output_length), item)
        progress(len(tokens))
        return tokens, ()

    return _serve(workload, concurrency, call)


def _serve(workload: Workload, concurrency: int, call: Callable[[Item], Timed]) -> tuple[list[Row], float]:
    """Run `call` for each item at its arrival, on `concurrency` threads; rows, and seconds to the last one's end."""

    def one(item: Item) -> Row:
        _sleep_until(start + item.arrival)
        sent_at = time.perf_counter()
        return Row(item, sent_at, *call(item))

    with ThreadPoolExecutor(concurrency, thread_name_prefix="client") as pool:
        start = time.perf_counter()
        futures = [pool.submit(one, item) for item in workload.items]
        try:
            rows = [future.result() for future in as_completed(futures)]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return rows, time.perf_counter() - start


def with_step_times(engine: Any, rows: Sequence[Row], wall: float) -> Outcome:
    """The outcome with token times from the engine's step records: no streamer needs to slow the callers down."""
    stats, steps = engine.stats(), engine.steps()
    if stats.native_calls:
        raise RuntimeError(f"hf_cb ran calls natively: {dict(stats.native_calls)}")
    times: defaultdict[int, list[float]] = defaultdict(list)
    for step in steps:
        for request_id in step.sampled:
            times[request_id].append(step.started + step.seconds)
    held = sum(step.blocks_used * step.block_size for step in steps)
    seconds = sum(step.seconds for step in steps)
    return Outcome(
        tuple(_matched(rows, times)),
        wall,
        len(steps),
        kv_waste=1 - sum(step.tokens_stored for step in steps) / held if held else None,
        outside_model=1 - sum(step.model_seconds for step in steps) / seconds if seconds else None,
        notes=f"attention {stats.attention_backend}, preemptions {stats.preemptions}",
    )


def _matched(rows: Sequence[Row], times: Mapping[int, Sequence[float]]) -> Iterable[Row]:
    """Rows with their times. `generate` doesn't tell its request's id, but ids ascend in the order of sending.

    Among rows of one output length the n-th sent has the n-th id. Two that are sent at the same moment may change places,
    which changes neither's delay by more than the moments differ.
    """
    ids: defaultdict[int, list[int]] = defaultdict(list)
    for request_id in sorted(times, reverse=True):
        ids[len(times[request_id])].append(request_id)
    for row in sorted(rows, key=lambda row: row.sent_at):
        same_length = ids[row.item.output_length]
        if not same_length:
            raise RuntimeError(f"no request on record has the {row.item.output_length} tokens of request {row.item.index}")
        yield Row(row.item, row.sent_at, row.tokens, tuple(times[same_length.pop()]))


def _manager_config(workload: Workload, device: torch.device) -> ContinuousBatchingConfig:
    """Room for all requests at once, with a quarter to spare, since it admits nothing when the cache is nearly full. On a GPU
    what it chooses itself."""
    if device.type != "cpu":
        return ContinuousBatchingConfig(max_requests_per_batch=len(workload.items))
    blocks = sum(_pages(len(item.prompt) + item.output_length, _PAGE_SIZE) for item in workload.items)
    return ContinuousBatchingConfig(
        page_size=_PAGE_SIZE,
        num_blocks=blocks + blocks // 4 + 4,
        max_batch_tokens=_MAX_BATCH_TOKENS,
        max_requests_per_batch=len(workload.items),
    )


def _add(manager: Any, item: Item) -> None:
    manager.add_request(
        list(item.prompt),
        request_id=str(item.index),
        max_new_tokens=item.output_length,
        record_timestamps=True,
        eos_token_id=-1,  # its word for none
    )


def _paged_waste(workload: Workload, page_size: int) -> float:
    """Whole pages against the tokens in them, for every request at every one of its tokens."""
    lengths = [len(item.prompt) + step for item in workload.items for step in range(item.output_length)]
    return 1 - sum(lengths) / sum(_pages(length, page_size) * page_size for length in lengths)


def _pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def inputs(model: Any, item: Item) -> dict[str, torch.Tensor]:
    ids = torch.tensor([item.prompt], device=model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}  # else a pad token in the prompt would be masked


def _new_tokens(output: torch.Tensor, item: Item) -> tuple[int, ...]:
    return tuple(output[0, len(item.prompt) :].tolist())


def _left_padded(model: Any, batch: Sequence[Item], width: int) -> dict[str, torch.Tensor]:
    ids = torch.full((len(batch), width), model.generation_config.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, item in enumerate(batch):
        ids[row, width - len(item.prompt) :] = torch.tensor(item.prompt)
        mask[row, width - len(item.prompt) :] = 1
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}


def _sleep_until(moment: float) -> None:
    if (delay := moment - time.perf_counter()) > 0:
        time.sleep(delay)
