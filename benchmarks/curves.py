"""Curves: throughput against requests in flight, or latency against the rate of arrival; a JSON file and a picture of it.

`normalised` is Orca's and vLLM's measure: the mean over the requests of the time from arrival to last token, per output token.

python -m benchmarks.curves concurrency --out out
python -m benchmarks.curves arrivals --out out
python -m benchmarks.curves normalised --out out
python -m benchmarks.curves draw out/concurrency.json
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks import lineup, machine, pictures, report, shapes, subject
from benchmarks.lineup import Lineup
from benchmarks.workload import Workload

_CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
_RATES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)  # requests a second
_SHORT_RATES = (1.0, 4.0, 8.0, 16.0)  # of requests of a fifth of the length, for a curve of all peers in some minutes
_REQUESTS_EACH = 4  # for each client: so many that the start and the end, with fewer in flight, count little
_FEWEST, _MOST = 8, 64
_FASTEST = ["generate_batch", "hf_cb"]

Plan = tuple[Workload, int | None]  # what runs at one point, and how many clients send it


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    if args.kind == "draw":
        result = json.loads(args.file.read_text())
        print(pictures.draw(result, args.file.with_suffix(".png")))
        return
    for name in ("transformers", "ContinuousBatchingLogger"):  # they warn that nothing ends a sequence, at each run
        logging.getLogger(name).setLevel(logging.ERROR)
    measured = subject.load(args.model, args.shape, args.dtype)
    plan = _at_concurrency if args.kind == "concurrency" else _at_rate

    def make(requests: int, rate: float | None) -> Workload:
        return Workload.make(measured.source, requests, seed=args.seed, scale=args.scale, rate=rate)

    with Lineup(measured, args.peers, args.engine) as line:
        line.warm_up(make(_FEWEST, None))
        points = [
            {"x": x, "peers": _point(line, plan(x, make), f"{args.kind} {x:g}", args.repeats)}
            for x in args.points or args.default
        ]
    result = {"kind": args.kind, "dtype": args.dtype, "machine": machine.describe(), "arguments": vars(args), "points": points}
    file = pictures.save(result, args.out / f"{args.kind}.json")
    for point in points:
        print(f"\n{args.kind} {point['x']:g}\n{report.table(point['peers'], 0)}")
    print(f"\n{file}\n{pictures.draw(result, file.with_suffix('.png'))}")


def _at_concurrency(clients: float, make: Callable[[int, float | None], Workload]) -> Plan:
    """A part of the one workload, alike in its lengths, long enough for that many clients."""
    requests = min(_MOST, max(_FEWEST, _REQUESTS_EACH * round(clients)))
    return make(_MOST, None).subset(requests), round(clients)


def _at_rate(rate: float, make: Callable[[int, float | None], Workload]) -> Plan:
    return make(_MOST // 2, rate), None


def _point(line: Lineup, plan: Plan, title: str, repeats: int) -> dict[str, report.Figures]:
    """Medians of all peers at one point, in turns."""
    workload, clients = plan
    rounds = []
    for number in range(repeats):
        figures = {}
        for name in line.names:
            outcome, usage = line.run(name, workload, clients, f"{title}, {number + 1}/{repeats} {name}")
            figures[name] = report.figures(outcome, workload, usage)
        rounds.append(figures)
    if spoilt := report.disturbed(rounds):
        tqdm.write(f"{title} DISTURBED by other programs, don't compare: round and peer {', '.join(spoilt)}")
    return report.medians(rounds)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__.splitlines()[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, default, unit, scale, peers in (
        ("concurrency", _CONCURRENCY, "requests in flight", 1.0, _FASTEST),
        ("arrivals", _RATES, "requests a second", 1.0, _FASTEST),
        ("normalised", _SHORT_RATES, "requests a second", 0.2, ["locked", "static", *_FASTEST]),
    ):
        sub = kinds.add_parser(kind, help=f"measure and draw; points are {unit}")
        sub.set_defaults(default=default)
        sub.add_argument("--points", type=_numbers, metavar="A,B", help=f"{unit}; default: {','.join(map(str, default))}")
        sub.add_argument("--peers", type=lineup.names, default=peers, metavar="A,B", help=f"default: {','.join(peers)}")
        sub.add_argument("--model", help="an id or a folder; default: the packaged SmolLM2-135M-Instruct")
        sub.add_argument("--shape", choices=list(shapes.SHAPES), help="a model of this form with random weights instead")
        sub.add_argument("--dtype", choices=["bfloat16", "float32", "float16"], default="bfloat16")
        sub.add_argument("--repeats", type=int, default=1, help="rounds at each point; medians are drawn")
        sub.add_argument("--seed", type=int, default=0)
        sub.add_argument("--scale", type=float, default=scale, help="factor on all lengths (%(default)s)")
        sub.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="CBConfig fields for hf_cb")
        sub.add_argument("--out", type=Path, default=Path("out"), metavar="FOLDER")
    kinds.add_parser("draw", help="draw a JSON file again").add_argument("file", type=Path)
    return parser.parse_args(argv)


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
