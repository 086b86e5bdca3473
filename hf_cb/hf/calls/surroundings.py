"""Surroundings: what a caller's thread has set for the code that runs on it, for code of the caller's that runs elsewhere."""

from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")
NEEDS_CALLERS_THREAD = "needs_callers_thread"
"""A processor or criterion with this attribute, and true, runs on no thread but its caller's: its calls are native."""


class Surroundings:
    """Context variables, gradient and inference mode and default device of the thread that makes it. For one other thread; a
    second one takes a copy. What code keeps in a `threading.local` can't be carried.
    """

    def __init__(self) -> None:
        self._before = contextvars.copy_context()
        self._context = contextvars.copy_context()
        self._is_inference, self._has_grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        device = torch.get_default_device()
        self._device = contextlib.nullcontext() if device.type == "cpu" else device

    def run(self, function: Callable[..., _T], *args: Any) -> _T:
        """`function(*args)`, on the thread that calls this."""
        return self._context.run(self._run, function, *args)

    def _run(self, function: Callable[..., _T], *args: Any) -> _T:
        with torch.inference_mode(self._is_inference), torch.set_grad_enabled(self._has_grad), self._device:
            return function(*args)

    def copy(self) -> Surroundings:
        """A copy of these surroundings for another thread."""
        made = copy.copy(self)
        made._context = self._context.copy()
        return made

    def bring_back(self) -> None:
        """On the caller's thread: set the context variables that code has set meanwhile."""
        for variable, value in self._context.items():
            if self._before.get(variable, _NOTHING) is not value:
                variable.set(value)


_NOTHING = object()


def needs_callers_thread(own: Any) -> str | None:
    """The name of what says so: `own`, or the first of several."""
    if own is None:
        return None
    found = (item for item in (own if isinstance(own, (list, tuple)) else (own,)) if getattr(item, NEEDS_CALLERS_THREAD, False))
    return next((getattr(item, "__name__", type(item).__name__) for item in found), None)
