"""The machine: what a figure depends on, and the memory that this process holds."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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


class PeakMemory:
    """The most bytes that the process was seen to hold."""

    def __init__(self) -> None:
        self.bytes = resident_bytes()


@contextmanager
def peak_memory() -> Iterator[PeakMemory]:
    """Watches the process's resident memory while the body runs, 20 times a second: the kernel's own peak never falls again."""
    peak, done = PeakMemory(), threading.Event()

    def watch() -> None:
        while not done.wait(_SAMPLE_SECONDS):
            peak.bytes = max(peak.bytes, resident_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()
        peak.bytes = max(peak.bytes, resident_bytes())


def resident_bytes() -> int:
    """Resident memory of this process; where /proc doesn't tell, its peak so far."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if platform.system() == "Darwin" else peak * 1024


def _cpuinfo(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
