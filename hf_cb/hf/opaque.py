"""Calls that torch.compile does not look into: to it, one operation whose result has a known shape.

Which call it is, a tensor says. To the compiler that is an input like any other, so that layers which differ in nothing else
share what was compiled for the first; a number or an object would be a constant, and each layer compiled for itself.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.library import Library, register_fake

_HANDLE = "_hf_cb_handle"
_ids = itertools.count()


class _Call:
    """What stands behind a handle. Kept by the module, so that both end together."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.function = function
        self.handle = torch.tensor(next(_ids), dtype=torch.int64, device="cpu")
        _calls[int(self.handle)] = self


_calls: weakref.WeakValueDictionary[int, _Call] = weakref.WeakValueDictionary()


def make_opaque(module: nn.Module, function: Callable[..., torch.Tensor]) -> None:
    """From now on, `call(module, ...)` calls `function`, whose result is new memory."""
    made = _Call(function)
    vars(module)["_hf_cb_call"] = made
    vars(module)[_HANDLE] = made.handle


def is_opaque(module: nn.Module) -> bool:
    """Whether `call` may be used."""
    return _HANDLE in vars(module)


def call(module: nn.Module, inputs: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """The module's function of `inputs`; the result has this shape, and the dtype and device of the first input."""
    out: torch.Tensor = torch.ops.hf_cb_opaque.call(inputs, module._hf_cb_handle, shape)
    return out


def _run(inputs: Sequence[torch.Tensor], handle: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return _calls[int(handle)].function(*inputs).contiguous()  # as the compiler was told


def _promise(inputs: Sequence[torch.Tensor], handle: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return inputs[0].new_empty(shape)


_library = Library("hf_cb_opaque", "DEF")
_library.define("call(Tensor[] inputs, Tensor handle, SymInt[] shape) -> Tensor")
_library.impl("call", _run, "CompositeExplicitAutograd")
register_fake("hf_cb_opaque::call", _promise, lib=_library)
