"""`hf-cb doctor`: print what hf_cb.doctor finds."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from hf_cb.cli.arguments import Commands, add_command, add_device, device_of


def add_to(commands: Commands) -> None:
    """Make it one of the commands."""
    parser = add_command(
        commands,
        "doctor",
        "look whether hf_cb works on this machine, and how well",
        "Print the environment, the attention that is chosen and why, whether it is right, and how fast it is.",
        "  hf-cb doctor\n  hf-cb doctor --device cuda:1 --json report.json\n",
    )
    add_device(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there, too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0, or 1 if something is not well."""
    from hf_cb.doctor import Report, examine

    device = device_of(args)
    report: Report = examine(device, lambda part: print(f"... {part}", file=sys.stderr))
    print("\n".join(_lines(report)))
    if args.json:
        args.json.write_text(json.dumps({**dataclasses.asdict(report), "is_well": report.is_well}, indent=1) + "\n")
    return 0 if report.is_well else 1


def _lines(report: Any) -> list[str]:
    lines = [f"{name:<16}{value or 'not installed'}" for name, value in report.environment.items()]
    for dtype, backends in report.backends.items():
        lines += ["", f"attention in {dtype}", *(f"  {name:<16}{state}" for name, state in backends.items())]
    lines += ["", *(f"{'ok' if problem is None else 'WRONG':<7}{name}" for name, problem in report.checks.items())]
    lines += [f"       {name}: {problem}" for name, problem in report.checks.items() if problem]
    if report.speed:
        speed = report.speed
        lines.append(
            f"\n16 rows of a model of 0.1 billion bfloat16 weights: {speed['step_ms']:.0f} ms a step, "
            f"{speed['tokens_per_second']:.0f} tokens/s; {speed['share_of_bandwidth']:.0%} of the "
            f"{speed['memory_gb_per_second']:.0f} GB/s that this device reads"
        )
    return lines
