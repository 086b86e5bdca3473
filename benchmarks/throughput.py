"""The throughput benchmark: the same requests through each peer, in turns, and what came of it.

python -m benchmarks.throughput --json result.json
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import alone, lineup, machine, profiling, report, roofline, scheduler, shapes, subject
from benchmarks.lineup import Lineup
from benchmarks.outcome import Outcome
from benchmarks.subject import Subject
from benchmarks.workload import Workload

_DEFAULT_PEERS = ("locked", "static", "generate_batch", "hf_cb")


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    for name in ("transformers", "ContinuousBatchingLogger"):  # they warn that nothing ends a sequence, at each run
        logging.getLogger(name).setLevel(logging.ERROR)
    result: dict[str, Any] = {"machine": machine.describe(), "arguments": vars(args), "dtypes": {}}
    print(_machine_line(result["machine"]))
    for dtype in args.dtypes:
        measured = subject.load(args.model, args.shape, dtype, args.device)
        workload = Workload.make(measured.source, args.requests, seed=args.seed, scale=args.scale, rate=args.rate)
        if args.profile:
            part = {"profile": profiling.run(measured.model, workload, args.concurrency or args.requests, **args.engine)}
        else:
            part = _compare(measured, workload, args)
        result["dtypes"][dtype] = part
        print(f"\n{dtype}: {_render(part, workload)}")
        del measured
        gc.collect()
    if not args.profile:
        result["scheduler"] = scheduler.measure()
        print("\nscheduler alone: " + ", ".join(f"{key} {_short(value)}" for key, value in result["scheduler"].items()))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1, default=str) + "\n")


def _compare(measured: Subject, workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of all peers, one after the other, after a short warm-up of each; then one request alone, and the roofline."""
    plans = {name: workload.subset(args.subset.get(name, len(workload.items))) for name in args.peers}
    rounds, last = [], {}
    with Lineup(measured, args.peers, args.engine) as line:
        line.warm_up(workload)
        for number in range(args.repeats):
            figures = {}
            for name, plan in plans.items():
                last[name], usage = line.run(name, plan, args.concurrency, f"{number + 1}/{args.repeats} {name}")
                figures[name] = report.figures(last[name], workload, usage)
            rounds.append(figures)
        single = alone.measure(measured.model, measured.source, args.repeats, args.scale, line.externals, **args.engine)
    return {
        "workload": {
            "requests": len(workload.items),
            "prompt_tokens": workload.prompt_tokens,
            "output_tokens": workload.output_tokens,
        },
        "medians": report.medians(rounds),
        "rounds": rounds,
        "disturbed": report.disturbed(rounds),
        "notes": {name: outcome.notes for name, outcome in last.items() if outcome.notes},
        "equal_requests": _equal(last) if measured.dtype == "float32" else None,
        "alone": single,
        "roofline": roofline.measure(measured.model, measured.source, args.scale, **args.engine),
    }


def _equal(last: dict[str, Outcome]) -> dict[str, tuple[int, int]]:
    """Requests with the same tokens; in float32 alone, where the promise is made."""
    ours = [name for name in last if name.startswith("hf_cb")]
    return {f"{a} = {b}": report.equal_requests(last[a], last[b]) for a in ours for b in last if b not in ours}


def _render(part: dict[str, Any], workload: Workload) -> str:
    if "profile" in part:
        return profiling.render(part["profile"])
    sizes, single = part["workload"], part["alone"]
    lines = [
        f"{sizes['requests']} requests, {sizes['prompt_tokens']} tokens in, {sizes['output_tokens']} out",
        report.table(part["medians"], len(workload.items)),
    ]
    for name, values in part["medians"].items():
        if values["measured_requests"] < len(workload.items):
            lines.append(f"* {name}: measured on {values['measured_requests']:.0f} requests, extrapolated by output tokens")
    if part["disturbed"]:
        lines.append(f"DISTURBED by other programs, don't compare: round and peer {', '.join(part['disturbed'])}")
    lines += [f"{name}: {note}" for name, note in part["notes"].items()]
    for pair, (equal, both) in (part["equal_requests"] or {}).items():
        lines.append(f"same tokens, {pair}: {equal} of {both} requests")
    rates = ", ".join(f"{name} {rate:.1f}" for name, rate in single["tokens_per_second"].items())
    ratios = ", ".join(f"x {name} {ratio:.2f}" for name, ratio in single["ratios"].items() if name != "hf_cb")
    lines.append(
        f"one request alone ({single['prompt_tokens']} in, {single['new_tokens']} out), tok/s: {rates}; hf_cb is {ratios}; "
        f"same tokens as plain: {single['same_tokens']}"
        + (" (DISTURBED)" if (single["other_cores"] or 0) > report.QUIET_CORES else "")
    )
    lines.append(roofline.render(part["roofline"]))
    return "\n".join(lines)


def _machine_line(facts: dict[str, Any]) -> str:
    return ", ".join(f"{key} {' '.join(value) if isinstance(value, list) else value}" for key, value in facts.items())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="an id or a folder; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--shape", choices=list(shapes.SHAPES), help="a model of this form with random weights instead")
    parser.add_argument("--device", default="cpu", help="of the model, as cuda; peers that load it themselves choose their own")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--dtypes", type=_dtypes, default=["bfloat16", "float32"], metavar="A,B")
    parser.add_argument(
        "--peers", type=lineup.names, default=list(_DEFAULT_PEERS), metavar="A,B", help=f"of {', '.join(lineup.NAMES)}"
    )
    parser.add_argument(
        "--subset", type=_subset, default={"locked": 8}, metavar="PEER=N,...", help="measure a slow peer on N requests"
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds; medians are reported")
    parser.add_argument("--concurrency", type=int, help="requests in flight at most; default: all")
    parser.add_argument("--rate", type=float, help="Poisson arrivals per second; default: all at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all lengths, for quick runs")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="CBConfig fields for hf_cb")
    parser.add_argument("--profile", action="store_true", help="run hf_cb once under the profiler instead")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def _dtypes(text: str) -> list[str]:
    known = ["bfloat16", "float32", "float16"]
    if unknown := set(dtypes := text.split(",")) - set(known):
        raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return dtypes


def _subset(text: str) -> dict[str, int]:
    pairs = dict(part.split("=") for part in text.split(",") if part)
    return {name: int(number) for name, number in pairs.items() if lineup.names(name)}


if __name__ == "__main__":
    main()
