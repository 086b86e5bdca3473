"""The machine: what a figure depends on, and the memory that this process holds."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

_SAMPLE_SECONDS = 0.05


def describe() -> dict[str, Any]:
    """Processor, cores, the vector extensions that matter for matrix products, and versions."""
    return {
        "processor": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "flags": [flag for flag in _cpuinfo("flags").split() if flag.startswith(("avx2", "avx512", "amx"))],
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@dataclass(slots=True)
class Usage:
    """What a stretch of time took."""

    peak_bytes: int  # the most that the process was seen to hold
    other_cores: float | None = None  # cores that other programs kept busy, on average; None where /proc/stat doesn't tell


@contextmanager
def usage(*pids: int) -> Iterator[Usage]:
    """Watches memory and the other programs while the body runs.

    `pids`: processes that work for this one. They don't count as others, and the memory is theirs instead of this one's.
    20 samples a second: the kernel's own peak never falls.
    """

    def held() -> int:
        return sum(map(resident_bytes, pids)) if pids else resident_bytes()

    seen, done = Usage(held()), threading.Event()
    others, start = _others_cpu_seconds(*pids), time.perf_counter()

    def watch() -> None:
        while not done.wait(_SAMPLE_SECONDS):
            seen.peak_bytes = max(seen.peak_bytes, held())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield seen
    finally:
        done.set()
        watcher.join()
        seen.peak_bytes = max(seen.peak_bytes, held())
        now = _others_cpu_seconds(*pids)
        if others is not None and now is not None:
            seen.other_cores = max(0.0, (now - others) / (time.perf_counter() - start))


def resident_bytes(pid: int | None = None) -> int:
    """Resident memory of this process or of `pid`; where /proc doesn't tell, this one's peak so far, and 0 of another."""
    try:
        return int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        if pid is not None:
            return 0
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if platform.system() == "Darwin" else peak * 1024


def cpu_seconds(pid: int) -> float:
    """CPU time that a process, with all its threads, has taken; OSError where /proc doesn't tell."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a name may hold spaces and brackets
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user and system, 14 and 15 of the whole line


def _others_cpu_seconds(*pids: int) -> float | None:
    """CPU time of everything but this process and `pids` since the machine started."""
    try:
        ticks = Path("/proc/stat").read_text().split()[1:4]  # user, nice, system, over all cores
        ours = sum(map(cpu_seconds, pids))
    except OSError:
        return None
    own = os.times()
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") - own.user - own.system - ours


def _cpuinfo(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
