"""What a thread may have switched on in torch that the engine's thread knows nothing of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack


def mode_of_caller() -> str | None:
    """A mode that sees, or changes, what the calling thread computes. A default device alone does not: models name theirs."""
    found: list[object] = []
    if torch._C._len_torch_function_stack():
        found += [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
    if torch._C._len_torch_dispatch_stack():
        found += _get_current_dispatch_mode_stack()
    return type(found[-1]).__name__ if found else None


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, nothing of the kind is on in this thread; what is made there can be written to by any other."""
    with contextlib.ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        yield
