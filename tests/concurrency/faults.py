"""Faults: errors raised in the place of calls that the engine's thread makes.

The thread's profile function sees each call before it is made, of Python and of C, and what that function raises, the call
raises. So every one of them can fail, and the code under test is as it is.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

import hf_cb
from hf_cb.worker import Worker

KINDS: tuple[type[BaseException], ...] = (ValueError, RuntimeError, MemoryError, SystemExit, KeyboardInterrupt)
_PACKAGE = Path(hf_cb.__file__).parent
_LOOP = frozenset(str(_PACKAGE / name) for name in ("worker.py", "answers.py", "engine_core.py"))
# A lock whose release fails stays locked for ever; whoever dies can't fail to die; and what a handle's finalizer raises, on
# whatever thread the handle is collected, nobody is told.
_NEVER_FAIL = frozenset({"__exit__", "_die", "forget"})


class Site(NamedTuple):
    """A call from one function of the package."""

    file: str
    caller: str
    callee: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}: {self.caller} -> {self.callee}"


def _site(frame: FrameType, event: str, arg: Any, is_looked_at: Callable[[str], bool]) -> Site | None:
    """The call that is about to be made, if a function of a file that is looked at makes it."""
    if event == "c_call":
        caller, callee = frame, arg.__name__
    elif event == "call" and frame.f_back is not None:
        caller, callee = frame.f_back, frame.f_code.co_name
    else:
        return None
    code = caller.f_code
    if not is_looked_at(code.co_filename) or callee in _NEVER_FAIL or code.co_name in _NEVER_FAIL:
        return None
    return Site(code.co_filename, code.co_name, callee)


@functools.cache
def _is_ours(file: str) -> bool:
    return file.startswith(str(_PACKAGE))


class Faults:
    """Decides at each call whether it fails. Used on one engine's thread at a time."""

    def __init__(self, pick: Callable[[Site], type[BaseException] | None], at_any_depth: bool = False) -> None:
        """`pick`: which error a call is to raise, None: none. It is asked of calls of the loop, or else `at_any_depth`."""
        self._pick = pick
        self._is_looked_at = _is_ours if at_any_depth else _LOOP.__contains__
        self.raised: list[BaseException] = []

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        site = _site(frame, event, arg, self._is_looked_at)
        if site is not None and (kind := self._pick(site)) is not None:
            self.raised.append(kind(f"injected at {site}"))
            raise self.raised[-1]  # which also takes this function away

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside, the threads of engines that start are profiled, from loop to loop."""
        awaits = Worker._await_work

        def arm(worker: Worker) -> bool:
            sys.setprofile(None)
            ready = awaits(worker)
            sys.setprofile(self.profile)
            return ready

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Worker, "_await_work", arm)
            yield


def recorded(seen: Counter[Site]) -> Faults:
    """Nothing fails; what is called is counted."""

    def note(site: Site) -> None:
        seen[site] += 1

    return Faults(note)


def once(where: Site, kind: type[BaseException], nth: int = 1) -> Faults:
    """The nth call at one site fails."""
    left = nth

    def pick(site: Site) -> type[BaseException] | None:
        nonlocal left
        left -= site == where
        return kind if site == where and left == 0 else None

    return Faults(pick)


def at_random(chance: random.Random, one_in: Callable[[Site], int]) -> Faults:
    """One in so many calls fails, at any depth."""
    return Faults(lambda site: chance.choice(KINDS) if chance.randrange(one_in(site)) == 0 else None, at_any_depth=True)
