"""WeightWatch: which of some tensors have been written to since it last looked."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

_SAMPLES = 8  # numbers of each tensor that are looked at
_AS_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightWatch:
    """Sees a write in three ways, since none sees all of them.

    A tensor's version counts its in-place operations. `weight.data = other` keeps the counter and moves the storage.
    `weight.data.add_(...)`, as adapters are merged, moves neither: some numbers spread over the tensor are compared (on a CPU).
    A write through `.data` that spares all of those goes unseen. Takes about a microsecond per tensor.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._states = [_version(tensor) for tensor in self._tensors]
        self._windows = [_window(tensor) for tensor in self._tensors]
        self._samples = [_bytes(window) for window in self._windows]

    def changed(self) -> list[torch.Tensor]:
        """Those that have changed since the last look."""
        changed = []
        for i, tensor in enumerate(self._tensors):
            state = _version(tensor)
            if state != self._states[i]:
                self._states[i] = state
                self._windows[i] = _window(tensor)
            elif _bytes(self._windows[i]) == self._samples[i]:
                continue
            self._samples[i] = _bytes(self._windows[i])
            changed.append(tensor)
        return changed


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


def _window(tensor: torch.Tensor) -> npt.NDArray[np.generic] | None:
    """A strided view of the tensor's own memory: a few numbers, in other columns of every row that is hit."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.dtype.itemsize not in _AS_INTEGERS:
        return None
    flat: npt.NDArray[np.generic] = tensor.detach().view(-1).view(_AS_INTEGERS[tensor.dtype.itemsize]).numpy()
    return flat[:: max(1, len(flat) // _SAMPLES - 1)]


def _bytes(window: npt.NDArray[np.generic] | None) -> bytes:
    return b"" if window is None else window.tobytes()
