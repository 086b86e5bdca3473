from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import machine, profiling, report
from benchmarks.machine import Usage
from benchmarks.outcome import Outcome, Row
from benchmarks.workload import Item, Workload


def item(index: int, prompt: int, output: int) -> Item:
    return Item(index, tuple(range(prompt)), output)


def row(of: Item, *times: float, sent: float = 0.0, tokens: tuple[int, ...] = ()) -> Row:
    return Row(of, sent, tokens or tuple(range(of.output_length)), times)


A, B = item(0, 10, 2), item(1, 30, 4)
BOTH = Workload((A, B))
RUN = Outcome(
    (row(A, 1.0, 1.5), row(B, 2.0, 2.5, 3.5, 4.0, sent=0.5)), wall_seconds=4.0, steps=4, kv_waste=0.25, outside_model=0.1
)

QUIET = Usage(1, 0.0)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([3, 1, 2], 50, 2), ([1, 2, 3, 4], 50, 2), ([1, 2, 3, 4], 99, 4), ([*range(1, 101)], 99, 99), ([7], 0, 7), ([], 50, None)],
)
def test_percentile_is_the_nearest_rank(values, percent, expected):
    assert report.percentile(values, percent) == expected


def test_figures_of_a_whole_run():
    got = report.figures(RUN, BOTH, Usage(123, 0.05))
    assert got == {
        "output_tokens_per_second": 6 / 4,
        "total_tokens_per_second": 46 / 4,
        "ttft_p50": 1.0,
        "ttft_p99": 1.5,  # from the moment of sending
        "inter_token_p50": 0.5,
        "inter_token_p99": 1.0,
        "normalised_latency": (1.5 / 2 + 3.5 / 4) / 2,
        "kv_waste": 0.25,
        "mean_batch": 1.5,
        "outside_model": 0.1,
        "peak_rss": 123,
        "other_cores": 0.05,
        "wall_seconds": 4.0,
        "measured_requests": 2,
        "measured_seconds": 4.0,
    }


def test_a_subset_is_extrapolated_by_output_tokens():
    got = report.figures(Outcome((row(A, 1.0, 1.5),), wall_seconds=2.0, steps=2), BOTH, QUIET)
    assert got["wall_seconds"] == 2.0 * 6 / 2
    assert got["output_tokens_per_second"] == 1.0  # as measured
    assert got["measured_requests"] == 1
    assert got["measured_seconds"] == 2.0
    assert got["ttft_p50"] is None


def test_ratios_are_taken_within_a_round():
    rounds = [
        {name: report.figures(Outcome(RUN.rows, wall, 4), BOTH, QUIET) for name, wall in walls.items()}
        for walls in (
            {"locked": 40, "generate_batch": 10, "hf_cb": 5},
            {"locked": 4, "generate_batch": 2, "hf_cb": 1},
            {"locked": 8, "generate_batch": 8, "hf_cb": 4},
        )
    ]
    got = report.medians(rounds)
    assert got["hf_cb"]["ratio_to_locked"] == 4  # of 8, 4, 2
    assert got["hf_cb"]["ratio_to_generate_batch"] == 2  # of 2, 2, 2
    assert got["locked"]["ratio_to_locked"] == 1
    assert got["hf_cb"]["output_tokens_per_second"] == 6 / 4
    assert got["hf_cb"]["kv_waste"] is None
    alone = report.medians([{"hf_cb": report.figures(RUN, BOTH, QUIET)}])
    assert alone["hf_cb"]["ratio_to_locked"] is None  # which did not run


def test_equal_requests_counts_those_that_both_ran():
    theirs = Outcome((row(B, 1, 2, 3, 4, tokens=(0, 1, 2, 9)),), 1.0, 4)
    assert report.equal_requests(RUN, RUN) == (2, 2)
    assert report.equal_requests(RUN, theirs) == (0, 1)


def test_a_result_with_a_token_too_few_is_refused():
    assert RUN.check(BOTH) is RUN
    with pytest.raises(RuntimeError, match="request 0: 1 tokens and 1 times, not 2"):
        Outcome((row(A, 1.0, tokens=(5,)), RUN.rows[1]), 1.0, 1).check(BOTH)
    with pytest.raises(RuntimeError, match="1 results for 2"):
        Outcome(RUN.rows[:1], 1.0, 1).check(BOTH)


def test_the_table_marks_extrapolated_peers():
    outcomes = {"locked": Outcome((row(A, 1.0, 1.5),), 2.0, 2), "hf_cb": RUN}
    results = {name: report.figures(outcome, BOTH, QUIET) for name, outcome in outcomes.items()}
    header, locked, ours = report.table(report.medians([results]), 2).splitlines()
    assert locked.split()[:3] == ["locked*", "1.0", "6.0"]
    assert ours.split()[:4] == ["hf_cb", "1.5", "11.5", "1.50"]
    assert "25.0" in ours.split()  # KV waste, in percent
    assert len(header) == len(locked) == len(ours)


def test_a_profile_adds_up_to_the_wall_clock():
    ops = {"aten::addmm": 2.0, "hf_cb::paged_attention": 1.0, "aten::rms_norm": 0.5, "aten::argmax": 0.25, "aten::empty": 0.25}
    groups = profiling.summary(ops, wall_seconds=5.0, outside_model=0.2)["groups"]
    assert groups == {
        "linear layers": 2.0,
        "attention": 1.0,
        "norms, activations, rotary": 0.5,
        "sampling": 0.25,
        "other ops": 0.25,
        "outside any op (Python, scheduling, waiting)": 1.0,
    }


def test_disturbed_runs_are_named():
    quiet, loud, unknown = (report.figures(RUN, BOTH, Usage(1, cores)) for cores in (0.05, 0.9, None))
    assert report.disturbed([{"a": quiet, "b": loud}, {"a": loud, "b": unknown}]) == ["1 b", "2 a"]


def test_usage_sees_the_memory_held_in_between():
    with machine.usage() as seen:
        held = bytearray(b"x" * (64 << 20))
    assert seen.peak_bytes >= len(held)


on_linux = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux tells what other programs take")


@on_linux
def test_usage_counts_another_program():
    spin = "import time; end = time.perf_counter() + 1.2\nwhile time.perf_counter() < end: pass"
    other = subprocess.Popen([sys.executable, "-c", spin])
    with machine.usage() as beside:
        time.sleep(0.6)
    assert other.wait() == 0
    assert beside.other_cores > 0.25  # a core, or what the machine leaves of one


@on_linux
def test_what_this_process_takes_is_not_the_others():
    others, everything = machine._others_cpu_seconds(), _cpu_seconds()
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
    assert (_cpu_seconds() - everything) - (machine._others_cpu_seconds() - others) > 0.4


def _cpu_seconds() -> float:
    return sum(map(int, Path("/proc/stat").read_text().split()[1:4])) / os.sysconf("SC_CLK_TCK")
