"""What it costs to be observed: `python -m benchmarks.observing [--rounds N] [--json FILE]`.

Callers keep the engine's slots full with short requests, in turns bare (no histograms, nobody watches) and observed: with
histograms, a span for each request and its parts through OpenTelemetry's SDK, a JSON log line for each, and a scrape of
/metrics each second.

The cost is told twice: by the medians of the turns' seconds per step, which a busy machine blurs, and by processor time,
which it doesn't: that of the observing code on the engine's thread (clocks around it included), and of that beside it (spans,
scrapes), against that of the steps on the engine's thread. It needs the extras `demo`, `metrics` and `tracing`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import hf_cb
from benchmarks import machine
from demo.packaged_model import load
from hf_cb import worker
from hf_cb.engine_core import EngineCore
from hf_cb.metrics.collector import EngineCollector
from hf_cb.metrics.logs import RequestLog, log_as_json
from hf_cb.metrics.spans import RequestTracer
from hf_cb.stats import Histogram, Meter

_METER = ("add", "add_admission", "add_first_token", "add_next_token", "add_request")  # what the engine's thread calls


class Clock:
    """Adds up the processor time that functions take, their clock included: on the engine's thread, and on others."""

    def __init__(self) -> None:
        self.on_engine = self.beside = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.thread_time() - began
                if threading.current_thread().name == "hf_cb-engine":
                    self.on_engine += taken
                else:
                    self.beside += taken

        return timed


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def bare() -> Iterator[None]:
    with replaced(Histogram, "observe", lambda self, value: None):
        yield


@contextlib.contextmanager
def observed(engine: hf_cb.Engine, clock: Clock | None) -> Iterator[None]:
    """With a clock, it is told the time that all of this takes."""
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
    tracer = RequestTracer("model", provider)
    with contextlib.ExitStack() as stack:
        collector = EngineCollector({"model": engine})
        scrape: Callable[..., Any] = collector.exposition
        if clock is not None:
            scrape = clock.around(scrape)
            for name in _METER:
                stack.enter_context(replaced(Meter, name, clock.around(getattr(Meter, name))))
            for owner, name in ((worker, "tell_ended"), (RequestTracer, "_make")):
                stack.enter_context(replaced(owner, name, clock.around(getattr(owner, name))))
        stack.callback(log_as_json(stack.enter_context(open("/dev/null", "w"))))
        stack.callback(provider.shutdown)
        stack.callback(tracer.close)
        for watcher in (tracer, RequestLog("model")):
            engine.watch(watcher)
            stack.callback(engine.unwatch, watcher)
        stack.enter_context(_each_second(scrape))
        yield


@contextlib.contextmanager
def _each_second(call: Callable[[], Any]) -> Iterator[None]:
    done = threading.Event()

    def run() -> None:
        while not done.wait(1.0):
            call()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def run(engine: hf_cb.Engine, args: argparse.Namespace) -> tuple[float, int]:
    """Seconds per step, and the number of steps, of one turn."""
    rng = random.Random(0)
    calls = [
        ([rng.randrange(100, 40_000) for _ in range(rng.randrange(8, 48))], rng.randrange(8, 40)) for _ in range(args.requests)
    ]
    before, began = engine.stats().steps, time.perf_counter()

    def ask(call: tuple[list[int], int]) -> None:
        engine.submit(call[0], max_new_tokens=call[1], eos_token_id=None, do_sample=False).result()

    with ThreadPoolExecutor(args.rows) as callers:
        list(callers.map(ask, calls))
    num_steps = engine.stats().steps - before
    return (time.perf_counter() - began) / num_steps, num_steps


def measure(args: argparse.Namespace) -> dict[str, Any]:
    model, _ = load(args.model)
    turns: dict[str, list[float]] = {"bare": [], "observed": []}
    with hf_cb.continuous_batching(model, max_batch_size=args.rows, prefix_cache=False) as engine, machine.usage() as usage:
        run(engine, args)  # finds cold caches
        for _ in range(args.rounds):
            with bare():
                turns["bare"].append(run(engine, args)[0])
            with observed(engine, None):
                turns["observed"].append(run(engine, args)[0])
        clock, steps = Clock(), Clock()
        with replaced(EngineCore, "step", steps.around(EngineCore.step)), observed(engine, clock):
            num_steps = run(engine, args)[1]
    medians = {name: statistics.median(steps) for name, steps in turns.items()}
    return {
        "machine": machine.describe(),
        "rows": args.rows,
        "requests": args.requests,
        "other_cores": usage.other_cores,
        "step_ms": {name: [1e3 * step for step in steps] for name, steps in turns.items()},
        "median_step_ms": {name: 1e3 * step for name, step in medians.items()},
        "observed_to_bare": medians["observed"] / medians["bare"],
        "cpu_ms_per_step": {
            "step": 1e3 * steps.on_engine / num_steps,
            "observing": 1e3 * clock.on_engine / num_steps,
            "observing beside": 1e3 * clock.beside / num_steps,
        },
        "share_of_step": clock.on_engine / steps.on_engine,
        "share_of_step_with_all": (clock.on_engine + clock.beside) / steps.on_engine,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="an id or a folder (default: the packaged model)")
    parser.add_argument("--rows", type=int, default=64, help="batch slots, and callers")
    parser.add_argument("--requests", type=int, default=256, help="of a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each kind")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    args = parser.parse_args(argv)
    figures = measure(args)
    print(json.dumps({name: value for name, value in figures.items() if name != "machine"}, indent=1))
    print(
        f"observed / bare: {figures['observed_to_bare']:.3f}; observing takes {figures['share_of_step']:.2%} of a step, "
        f"{figures['share_of_step_with_all']:.2%} with what other threads do"
    )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
