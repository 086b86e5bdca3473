"""What a call costs beside the model: `python -m benchmarks.call_cost [--calls 300]`.

One caller, one prompt of eight tokens, one new token, no prefix cache: the time that the model took is taken off each. The
rest is the seam (transformers' own preamble is most of it), the look at the model, the queue and two changes of thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import hf_cb
from demo.packaged_model import load

PROMPT = [504, 3575, 282, 4649, 314, 253, 1109, 282]


def milliseconds(engine: hf_cb.Engine, call: Callable[[], Any], calls: int) -> float:
    """The median over calls of what is not the model's time."""
    rest = []
    for _ in range(calls + 10):
        before, began = engine.stats().model_seconds, time.perf_counter()
        call()
        took = time.perf_counter() - began
        rest.append(1000 * (took - (engine.stats().model_seconds - before)))
    return statistics.median(rest[10:])  # the first ones warm up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--calls", type=int, default=300, help="calls of each kind; the median counts")
    calls = parser.parse_args().calls
    model, _ = load()
    ids = torch.tensor([PROMPT])
    with hf_cb.continuous_batching(model, prefix_cache=False) as engine:
        generate = milliseconds(engine, lambda: model.generate(ids, max_new_tokens=1, do_sample=False), calls)
        submit = milliseconds(engine, lambda: engine.submit(PROMPT, max_new_tokens=1, do_sample=False).result(), calls)
    print(f"beside the model: generate() {generate:.2f} ms, submit() {submit:.2f} ms a call (medians of {calls})")


if __name__ == "__main__":
    main()
