"""CPU threads: keep the callers' idle OpenMP pools from slowing the engine's.

Every thread that runs a parallel torch operation owns a pool of OpenMP workers, idle or not. GNU's runtime counts them all, and
once they outnumber the cores its workers stop spinning at barriers and sleep instead: each parallel operation then pays a
wake-up, which costs a third more per step on two cores. A caller that is about to wait for the engine needs no pool: it is
given up here, and made again (in about 0.1 ms) by its next parallel operation.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

_SOFT = 1  # omp_pause_soft, OpenMP 5.0: give up the pool, keep the settings


@functools.cache
def _pause() -> Callable[[int], int] | None:
    """OpenMP's omp_pause_resource_all of the GNU runtime that torch ships and uses; None where there is another or none."""
    for path in sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*")):
        function: Callable[[int], int] | None = getattr(ctypes.CDLL(str(path)), "omp_pause_resource_all", None)
        if function is not None:
            return function
    return None


def release_pool() -> None:
    """Give up the calling thread's OpenMP workers, if it has any. About 10 us when it has none."""
    pause = _pause()
    if pause is not None:
        pause(_SOFT)
