"""Who is served how much, and how soon: `python -m benchmarks.policies [--plot FILE] [--json FILE]`.

A made-up machine (10 ms a step and 0.2 ms a token; no model), on which a tenant floods the engine while two others send now and
then, under each policy. The curves are the service of each tenant (prompt tokens + 2 x output tokens) over time. Every tenant's
share is what it would see with a third of the machine to itself: its requests alone, every step three times as long.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_cb.core.block_pool import BlockPool
from hf_cb.core.fair import OUTPUT_COST, PROMPT_COST, Fair
from hf_cb.core.kv_manager import KVManager
from hf_cb.core.output import StepResult
from hf_cb.core.policy import FCFS, Policy
from hf_cb.core.priority import Priority
from hf_cb.core.scheduler import Scheduler
from hf_cb.request import Request, Service

POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": FCFS, "priority": Priority, "fair": Fair}
PRIORITIES = {"flood": 2, "steady": 1, "bursts": 0}


@dataclass
class Curves:
    """`times` in seconds; `service` by tenant, as long; `first_tokens`: seconds from arrival, by tenant."""

    times: list[float] = field(default_factory=list)
    service: dict[str, list[int]] = field(default_factory=dict)
    first_tokens: dict[str, list[float]] = field(default_factory=dict)


def arrivals(seconds: float, seed: int) -> list[tuple[float, str, int, int]]:
    """(when, tenant, prompt tokens, output tokens), in order."""
    rng = random.Random(seed)
    jobs = [(0.02 * i, "flood", rng.randint(50, 200), rng.randint(20, 60)) for i in range(int(seconds / 0.02))]
    jobs += [(0.5 * i, "steady", rng.randint(20, 100), rng.randint(20, 60)) for i in range(int(seconds / 0.5))]
    jobs += [(5.0 * (i // 8), "bursts", rng.randint(20, 100), rng.randint(20, 60)) for i in range(8 * int(seconds / 5))]
    return sorted(jobs)


def simulate(policy: Policy, jobs: Sequence[tuple[float, str, int, int]], seconds: float, slowness: float = 1.0) -> Curves:
    scheduler = Scheduler(KVManager(BlockPool(2000), 16), max_batch_tokens=512, max_batch_size=32, policy=policy)
    curves = Curves()
    served = dict.fromkeys((tenant for _, tenant, _, _ in jobs), 0)
    curves.service = {tenant: [] for tenant in served}
    curves.first_tokens = {tenant: [] for tenant in served}
    requests: dict[int, tuple[float, str, int]] = {}
    now, coming = 0.0, list(reversed(jobs))
    while now < seconds and (coming or scheduler.has_work):
        while coming and (coming[-1][0] <= now or not scheduler.has_work):
            at, tenant, num_prompt, num_output = coming.pop()
            now = max(now, at)
            request = Request((0,) * num_prompt, num_output, service=Service(PRIORITIES[tenant], tenant))
            requests[request.request_id] = at, tenant, num_prompt
            scheduler.add(request)
        output = scheduler.schedule()
        now += slowness * (0.010 + 0.0002 * output.num_scheduled_tokens)
        seen = {row.request_id for row in output.rows if row.start + len(row.token_ids) == requests[row.request_id][2]}
        for emission in scheduler.update(output, StepResult({row.request_id: (1,) for row in output.rows if row.num_logits})):
            at, tenant, num_prompt = requests[emission.request_id]
            served[tenant] += OUTPUT_COST
            if emission.request_id in seen:
                served[tenant] += PROMPT_COST * num_prompt
                curves.first_tokens[tenant].append(now - at)
        curves.times.append(now)
        for tenant, amount in served.items():
            curves.service[tenant].append(amount)
    return curves


def measure(seconds: float = 60.0, seed: int = 0) -> tuple[dict[str, Any], dict[str, Curves]]:
    """Figures, and the curves by policy."""
    jobs = arrivals(seconds, seed)
    curves = {name: simulate(make(), jobs, seconds) for name, make in POLICIES.items()}
    tenants = list(curves["fcfs"].service)
    shares = {
        tenant: statistics.median(
            simulate(FCFS(), [job for job in jobs if job[1] == tenant], seconds, len(tenants)).first_tokens[tenant]
        )
        for tenant in tenants
    }
    figures = {
        name: {
            tenant: {
                "service": curve.service[tenant][-1],
                "first_token_s_median": (median := statistics.median(curve.first_tokens[tenant] or [float("inf")])),
                "x_own_share": median / shares[tenant],
            }
            for tenant in tenants
        }
        for name, curve in curves.items()
    }
    return {"seconds": seconds, "seed": seed, "own_share_s": shares, "policies": figures}, curves


def plot(curves: Mapping[str, Curves], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.4), layout="constrained")
    axes = figure.subplots(2, len(curves), sharex=True, sharey="row")
    for column, (name, curve) in enumerate(curves.items()):
        for i, (tenant, service) in enumerate(curve.service.items()):
            for ax in axes[:, column] if tenant != "flood" else axes[:1, column]:
                ax.plot(curve.times, service, label=tenant, color=f"C{i}")
        axes[0, column].set_title(name)
        axes[1, column].set_xlabel("seconds")
    axes[0, 0].set_ylabel("all tenants")
    axes[1, 0].set_ylabel("without the one that floods")
    figure.supylabel(f"{PROMPT_COST} x prompt + {OUTPUT_COST} x output tokens served", fontsize="medium")
    axes[0, 0].legend()
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of made-up time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    figures, curves = measure(args.seconds, args.seed)
    for name, tenants in figures["policies"].items():
        for tenant, values in tenants.items():
            print(f"{name:<10}{tenant:<8}" + "  ".join(f"{key} {value:.4g}" for key, value in values.items()))
    if args.plot:
        plot(curves, args.plot)
    if args.json:
        data = {**figures, "curves": {name: {"times": c.times, "service": c.service} for name, c in curves.items()}}
        args.json.write_text(json.dumps(data) + "\n")


if __name__ == "__main__":
    main()
