"""WeightWatch: which of some tensors have been written to since it last looked."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from hf_cb.attention.extension import is_loaded

_SAMPLES = 8  # places of each tensor that are looked at


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory that a weight is made of: itself, or its part in this process, or what a quantised one is in."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, torch.Tensor):  # a distributed one names its mesh as well
            yield from plain_parts(part)


class Marks:
    """What tells that one of some tensors was written to, or is another, in the ways that cost nothing to see."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)
        self._plain = all(type(tensor.data) is torch.Tensor and tensor.device.type == "cpu" for tensor in self.tensors)

    def all(self) -> torch.Tensor:
        """Of all tensors as they are now."""
        found = self.quick()
        return torch.tensor([_state(tensor) for tensor in self.tensors], device="cpu") if found is None else found

    def quick(self) -> torch.Tensor | None:
        """The same; None: there is nothing that would be faster than looking at them one by one."""
        return torch.ops.hf_cb.marks(self.tensors) if is_loaded() and self._plain else None


class WeightWatch:
    """Sees a write in three ways, since none sees all of them.

    A tensor's version counts its in-place operations. `weight.data = other` keeps the counter and moves the storage.
    `weight.data.add_(...)`, as adapters are merged, moves neither: some bytes spread over the tensor are compared (on a CPU).
    A write through `.data` that spares all of those goes unseen. Takes a microsecond or two per tensor; without the bytes
    a tenth of that, where the kernels for CPUs are there to look.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], notes: Sequence[Sequence[str]] = ()) -> None:
        """`notes`: lists that change with some of the tensors."""
        self._look = Marks(tensors)
        self._tensors = self._look.tensors
        self._notes = notes
        self._noted = [*map(tuple, notes)]
        self._states = [_state(tensor) for tensor in self._tensors]
        self._windows = [_window(tensor) for tensor in self._tensors]
        self._samples = [_bytes(window) for window in self._windows]
        self._marks = self._look.quick()

    def changed(self, samples: bool = True) -> list[torch.Tensor]:
        """Those that have changed since the last look, by their numbers too if `samples`, or if a note has changed."""
        noted = [*map(tuple, self._notes)]
        if noted != self._noted:
            self._noted, samples = noted, True
        marks = self._look.quick()
        if not samples and marks is not None and self._marks is not None and torch.equal(marks, self._marks):
            return []
        self._marks = marks
        changed = []
        for i, tensor in enumerate(self._tensors):
            state = _state(tensor)
            if state != self._states[i]:
                self._states[i] = state
                self._windows[i] = _window(tensor)
            elif not samples or _bytes(self._windows[i]) == self._samples[i]:
                continue
            self._samples[i] = _bytes(self._windows[i])
            changed.append(tensor)
        return changed


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


def _window(tensor: torch.Tensor) -> npt.NDArray[np.generic] | None:
    """A strided view of the tensor's own memory: a few numbers, in other columns of every row that is hit.

    It is read only where the tensor has the address that it had when this was made. By the address, and not by
    `tensor.numpy()`, after which torch refuses to resize the user's storage.
    """
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.data_ptr():
        return None
    storage = tensor.untyped_storage()
    begin, size = (tensor.data_ptr(), tensor.nbytes) if tensor.is_contiguous() else (storage.data_ptr(), storage.nbytes())
    if not size:
        return None
    memory: npt.NDArray[np.generic] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(begin))
    words = memory[: size // 4 * 4].view(np.uint32) if size >= 4 else memory
    return words[:: max(1, len(words) // _SAMPLES - 1)]


def _bytes(window: npt.NDArray[np.generic] | None) -> bytes:
    return b"" if window is None else window.tobytes()
