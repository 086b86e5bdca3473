"""What the scheduler costs: `python -m benchmarks.scheduler [--json FILE]`.

No model: a step's result is made up, so that only `schedule` and `update` are timed. All features are on: the prefix cache
(every sequence fills and publishes blocks), the policy "fair" with 16 tenants, a target time between tokens, swapping.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from hf_cb.core.block_pool import BlockPool
from hf_cb.core.fair import Fair
from hf_cb.core.kv_manager import KVManager
from hf_cb.core.output import SchedulerOutput, StepResult
from hf_cb.core.pacing import Pacer
from hf_cb.core.scheduler import Scheduler
from hf_cb.request import Request, Service

BLOCK_SIZE = 16
NUM_RUNNING = 256


def measure(num_steps: int = 1000, num_requests: int = 5000, seed: int = 0) -> dict[str, float | int]:
    """Time steady decoding with 256 running sequences, and many requests through in order. Raises if the order is not kept."""
    return {**_measure_steps(num_steps), **_measure_requests(num_requests, random.Random(seed))}


def _result(output: SchedulerOutput) -> StepResult:
    return StepResult({row.request_id: (1,) for row in output.rows if row.num_logits})


def _measure_steps(num_steps: int) -> dict[str, float | int]:
    num_prompt_tokens = 100
    blocks = NUM_RUNNING * -(-(num_prompt_tokens + num_steps + 1) // BLOCK_SIZE)
    scheduler = Scheduler(
        KVManager(BlockPool(blocks), BLOCK_SIZE, shares=True, num_host_blocks=1024),
        max_batch_tokens=NUM_RUNNING * num_prompt_tokens,
        max_batch_size=NUM_RUNNING,
        policy=Fair(),
        pacer=Pacer(0.05, BLOCK_SIZE),
    )
    for i in range(NUM_RUNNING):
        prompt = (i, *range(1, num_prompt_tokens))
        scheduler.add(Request(prompt, num_steps + 1, service=Service(tenant=f"tenant {i % 16}")))
    output = scheduler.schedule()
    scheduler.update(output, _result(output))
    wall: list[float] = []
    cpu: list[float] = []
    while scheduler.has_work:
        started = _clocks()
        output = scheduler.schedule()
        scheduled = _clocks()
        assert len(output.rows) == NUM_RUNNING
        result = _result(output)
        resumed = _clocks()
        scheduler.observe(output, 0.03)
        scheduler.update(output, result)
        updated = _clocks()
        for clock, times in enumerate((wall, cpu)):
            times.append(1e3 * (updated[clock] - resumed[clock] + scheduled[clock] - started[clock]))
    return {
        "running_sequences": NUM_RUNNING,
        "steps": len(wall),
        "step_ms_median": statistics.median(wall),
        "step_ms_p99": statistics.quantiles(wall, n=100)[98],
        "step_cpu_ms_median": statistics.median(cpu),
        "step_cpu_ms_p99": statistics.quantiles(cpu, n=100)[98],  # without the time that other processes took
    }


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


def _measure_requests(num_requests: int, rng: random.Random) -> dict[str, float | int]:
    scheduler = Scheduler(
        KVManager(BlockPool(2048), BLOCK_SIZE, shares=True), max_batch_tokens=2048, max_batch_size=NUM_RUNNING
    )
    requests = [Request((i, *range(rng.randint(0, 255))), rng.randint(1, 64)) for i in range(num_requests)]
    counts: dict[int, int] = {}
    steps = 0
    began = time.perf_counter()
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        output = scheduler.schedule()
        for emission in scheduler.update(output, _result(output)):
            counts[emission.request_id] = counts.get(emission.request_id, 0) + 1
        steps += 1
    seconds = time.perf_counter() - began
    scheduler.check()
    # A dict keeps the order of the first tokens.
    if list(counts.items()) != [(request.request_id, request.max_new_tokens) for request in requests]:
        raise RuntimeError("the requests did not come out in order and whole")
    return {
        "requests": num_requests,
        "requests_steps": steps,
        "requests_tokens": sum(counts.values()),
        "requests_preemptions": scheduler.num_preemptions,
        "requests_seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    figures = measure()
    for name, value in figures.items():
        print(f"{name:<22}{value:>12.3f}" if isinstance(value, float) else f"{name:<22}{value:>12,}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
