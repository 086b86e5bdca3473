"""The report: figures of one run, medians over rounds, ratios, agreement of tokens, and the table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.machine import Usage
from benchmarks.outcome import Outcome
from benchmarks.workload import Workload

Figures = dict[str, float | None]

QUIET_CORES = 0.1
"""More than this, taken by other programs, and a run counts as disturbed: torch's threads wait for each other at every op, so
that one lost core of two makes a step about five times slower, for whichever peer it hits."""

BASES = {
    "locked": "x locked",
    "static": "x static",
    "generate_batch": "x gen_batch",
    "vllm": "x vllm",
    "openvino": "x openvino",
}
"""The peers that ratios are taken to, and the columns' headings."""

# key, heading, factor from the stored unit to the printed one, format
_COLUMNS = (
    ("output_tokens_per_second", "out tok/s", 1, ".1f"),
    ("total_tokens_per_second", "all tok/s", 1, ".1f"),
    *((f"ratio_to_{name}", heading, 1, ".2f") for name, heading in BASES.items()),
    ("ttft_p50", "TTFT p50 s", 1, ".2f"),
    ("ttft_p99", "p99 s", 1, ".2f"),
    ("inter_token_p50", "ITL p50 ms", 1e3, ".0f"),
    ("inter_token_p99", "p99 ms", 1e3, ".0f"),
    ("normalised_latency", "s/token", 1, ".3f"),
    ("kv_waste", "KV waste %", 100, ".1f"),
    ("mean_batch", "batch", 1, ".1f"),
    ("outside_model", "outside %", 100, ".1f"),
    ("peak_rss", "RSS MiB", 1 / (1 << 20), ".0f"),
    ("other_cores", "others", 1, ".2f"),
    ("wall_seconds", "wall s", 1, ".1f"),
)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that at least `percent` % of the values don't exceed (nearest rank); None of none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def figures(outcome: Outcome, whole: Workload, usage: Usage) -> Figures:
    """One run's figures; times in seconds, memory in bytes.

    A run over a subset is extrapolated to the whole workload by output tokens: `wall_seconds` grows by that factor and the
    rates stay. Its time to first token and its latency would tell nothing about the whole queue, so they are None.
    """
    output_tokens = sum(len(row.tokens) for row in outcome.rows)
    prompt_tokens = sum(len(row.item.prompt) for row in outcome.rows)
    firsts = [row.token_times[0] - row.sent_at for row in outcome.rows]
    gaps = [b - a for row in outcome.rows for a, b in zip(row.token_times, row.token_times[1:], strict=False)]
    per_token = [(row.token_times[-1] - row.sent_at) / len(row.tokens) for row in outcome.rows]
    complete = len(outcome.rows) == len(whole.items)
    return {
        "output_tokens_per_second": output_tokens / outcome.wall_seconds,
        "total_tokens_per_second": (prompt_tokens + output_tokens) / outcome.wall_seconds,
        "ttft_p50": percentile(firsts, 50) if complete else None,
        "ttft_p99": percentile(firsts, 99) if complete else None,
        "inter_token_p50": percentile(gaps, 50),
        "inter_token_p99": percentile(gaps, 99),
        "normalised_latency": statistics.mean(per_token) if complete else None,
        "kv_waste": outcome.kv_waste,
        "mean_batch": output_tokens / outcome.steps,
        "outside_model": outcome.outside_model,
        "peak_rss": usage.peak_bytes,
        "other_cores": usage.other_cores,
        "wall_seconds": outcome.wall_seconds * whole.output_tokens / output_tokens,
        "measured_requests": len(outcome.rows),
        "measured_seconds": outcome.wall_seconds,
    }


def medians(rounds: Sequence[Mapping[str, Figures]]) -> dict[str, Figures]:
    """For each peer the median of each figure over the rounds.

    A ratio is taken within a round, where the runs are neighbours in time, and its median is reported: a machine's speed
    may drift from round to round.
    """
    result = {}
    for peer in rounds[0]:
        runs = [_with_ratios(round_, peer) for round_ in rounds]
        result[peer] = {key: _median([run[key] for run in runs]) for key in runs[0]}
    return result


def equal_requests(ours: Outcome, theirs: Outcome) -> tuple[int, int]:
    """How many of the requests that both ran have the same tokens, and how many both ran."""
    mine = {row.item.index: row.tokens for row in ours.rows}
    both = [row for row in theirs.rows if row.item.index in mine]
    return sum(row.tokens == mine[row.item.index] for row in both), len(both)


def table(results: Mapping[str, Figures], num_requests: int) -> str:
    """The peers, one a line, without the columns that none has. A star: measured on a subset and extrapolated."""
    columns = [column for column in _COLUMNS if any(values[column[0]] is not None for values in results.values())]
    lines = [["peer", *(heading for _, heading, _, _ in columns)]]
    for peer, values in results.items():
        star = "*" if (values["measured_requests"] or 0) < num_requests else ""
        lines.append([peer + star, *(_cell(values[key], factor, form) for key, _, factor, form in columns)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def disturbed(rounds: Sequence[Mapping[str, Figures]]) -> list[str]:
    """The runs in which other programs kept more than `QUIET_CORES` busy, as "round peer"."""
    return [
        f"{number} {peer}"
        for number, round_ in enumerate(rounds, 1)
        for peer, run in round_.items()
        if (run["other_cores"] or 0) > QUIET_CORES
    ]


def _with_ratios(round_: Mapping[str, Figures], peer: str) -> Figures:
    run = dict(round_[peer])
    for base in BASES:
        mine, theirs = run["output_tokens_per_second"], round_.get(base, {}).get("output_tokens_per_second")
        run[f"ratio_to_{base}"] = mine / theirs if mine and theirs else None
    return run


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _cell(value: Any, factor: float, form: str) -> str:
    return "-" if value is None else format(value * factor, form)
