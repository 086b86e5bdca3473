"""Peak memory of each peer over the same requests, in a fresh process each, against plain generate.

python -m benchmarks.memory --json memory.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import lineup, machine, shapes, subject
from benchmarks.lineup import Lineup
from benchmarks.workload import Workload

_PLAIN = "locked"
_PEERS = [_PLAIN, "generate_batch", "hf_cb"]


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    if args.only:
        args.json.write_text(json.dumps(_measure(args.only, args)))
        return
    peaks = {name: _in_a_fresh_process(name, args) for name in tqdm(args.peers, desc="memory", unit="peer", leave=False)}
    print(render(peaks))
    if args.json:
        args.json.write_text(json.dumps(peaks, indent=1) + "\n")


def render(peaks: Mapping[str, Mapping[str, Any]]) -> str:
    """One line for each peer: the peak, before the first request, and the peak against plain generate's."""
    plain = peaks.get(_PLAIN)
    lines = [f"{'peer':16}{'ready MiB':>11}{'peak MiB':>11}{'x plain':>9}"]
    for name, peak in peaks.items():
        ratio = f"{peak['peak_bytes'] / plain['peak_bytes']:.2f}" if plain else "-"
        lines.append(f"{name:16}{peak['ready_bytes'] / 2**20:11.0f}{peak['peak_bytes'] / 2**20:11.0f}{ratio:>9}")
    return "\n".join(lines)


def _measure(name: str, args: argparse.Namespace) -> dict[str, int]:
    """Memory with the model loaded, and the most during a run."""
    measured = subject.load(args.model, args.shape, args.dtype)
    workload = Workload.make(measured.source, args.requests, seed=args.seed, scale=args.scale)
    with Lineup(measured, [name], args.engine) as line:
        pids = [peer.pid for peer in line.externals.values()]
        ready = sum(map(machine.resident_bytes, pids)) if pids else machine.resident_bytes()
        _, usage = line.run(name, largest(workload) if name == _PLAIN else workload)
    return {"ready_bytes": ready, "peak_bytes": usage.peak_bytes}


def largest(workload: Workload) -> Workload:
    """The requests that decide the peak where one runs at a time: the longest prompt, and the most tokens in all."""
    longest = max(workload.items, key=lambda item: len(item.prompt))
    most = max(workload.items, key=lambda item: len(item.prompt) + item.output_length)
    return Workload(tuple(sorted({longest, most}, key=lambda item: item.index)))


def _in_a_fresh_process(name: str, args: argparse.Namespace) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "memory.json")
        options = ["--requests", str(args.requests), "--seed", str(args.seed), "--scale", str(args.scale)]
        options += ["--dtype", args.dtype, "--engine", json.dumps(args.engine)]
        options += [part for key in ("model", "shape") if (value := getattr(args, key)) for part in (f"--{key}", value)]
        command = [sys.executable, "-m", "benchmarks.memory", "--only", name, "--json", str(file), *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name} failed:\n{done.stderr}")
        return json.loads(file.read_text())


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="an id or a folder; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--shape", choices=list(shapes.SHAPES), help="a model of this form with random weights instead")
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "float16"], default="bfloat16")
    parser.add_argument("--peers", type=lineup.names, default=_PEERS, metavar="A,B", help=f"of {', '.join(lineup.NAMES)}")
    parser.add_argument("--only", choices=lineup.NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all lengths, for quick runs")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="CBConfig fields for hf_cb")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
