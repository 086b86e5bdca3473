"""WeightWatch: which of some tensors have been written to since it last looked."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from hf_cb.kernels.extension import is_loaded

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
        self.uncounted = [i for i, tensor in enumerate(self.tensors) if tensor.is_inference()]
        self._plain = all(type(tensor.data) is torch.Tensor and tensor.device.type == "cpu" for tensor in self.tensors)

    def all(self) -> tuple[object, ...]:
        """Of all tensors as they are now. Those without a counter are read, every byte."""
        found = self.quick()
        marks = [*map(state_of, self.tensors)] if found is None else found.tolist()
        return (*map(tuple, marks), *checksums([self.tensors[i] for i in self.uncounted]))

    def quick(self) -> torch.Tensor | None:
        """The same; None: there is nothing that would be faster than looking at them one by one."""
        return torch.ops.hf_cb.marks(self.tensors) if is_loaded() and self._plain else None


class WeightWatch:
    """Sees a write in three ways, since none sees all of them.

    A tensor's version counts its in-place operations. `weight.data = other` keeps the counter and moves the storage.
    `weight.data.add_(...)`, as adapters are merged, moves neither: some bytes spread over the tensor are compared (on a CPU).
    A write through `.data` that spares all of those goes unseen. Takes a microsecond or two per tensor; without the bytes
    a tenth of that, where the kernels for CPUs are there to look. Inference tensors keep no version: instead of some of
    their bytes, all are read, which takes as long as memory takes to give them.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], notes: Sequence[Sequence[str]] = ()) -> None:
        """`notes`: lists that change with some of the tensors."""
        self._look = Marks(tensors)
        self._tensors = self._look.tensors
        self._notes = notes
        self._noted = [*map(tuple, notes)]
        self._states = [state_of(tensor) for tensor in self._tensors]
        self._windows = [_window(tensor) for tensor in self._tensors]
        self._samples = [_bytes(window) for window in self._windows]
        self._sums = self._sum()
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
        sums = self._sum() if samples else self._sums
        rewritten = {i for i, now, before in zip(self._look.uncounted, sums, self._sums, strict=True) if now != before}
        self._sums = sums
        changed = []
        for i, tensor in enumerate(self._tensors):
            state = state_of(tensor)
            if state != self._states[i]:
                self._states[i] = state
                self._windows[i] = _window(tensor)
            elif i not in rewritten and (not samples or _bytes(self._windows[i]) == self._samples[i]):
                continue
            self._samples[i] = _bytes(self._windows[i])
            changed.append(tensor)
        return changed

    def _sum(self) -> list[int]:
        return checksums([self._tensors[i] for i in self._look.uncounted])


def state_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Its version, 0 where it keeps none, and its address."""
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """One number for all bytes of each, on whatever device."""
    dense = [tensor.detach().contiguous() for tensor in tensors]
    if is_loaded() and all(tensor.device.type == "cpu" for tensor in dense):
        return torch.ops.hf_cb.checksums(dense).tolist()  # type: ignore[no-any-return]
    return [_checksum(tensor) for tensor in dense]


def _checksum(tensor: torch.Tensor) -> int:
    """Without a kernel of ours. torch's own hash is no good: a tensor of an even size and its negative have the same."""
    if tensor.device.type == "cpu":
        return zlib.crc32(_memory(tensor.data_ptr(), tensor.nbytes).data) if tensor.nbytes else 0
    total = 0
    for chunk in tensor.reshape(-1).view(torch.uint8).split(1 << 22):
        places = torch.arange(chunk.numel(), dtype=torch.int64, device=chunk.device)
        total = (total * 31 + int((chunk * (places * 0x1E3779B97F4A7C15 | 1)).sum())) % (1 << 64)
    return total


def _memory(begin: int, size: int) -> npt.NDArray[np.uint8]:
    memory: npt.NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(begin))
    return memory


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
    memory = _memory(begin, size)
    words: npt.NDArray[np.generic] = memory[: size // 4 * 4].view(np.uint32) if size >= 4 else memory
    return words[:: max(1, len(words) // _SAMPLES - 1)]


def _bytes(window: npt.NDArray[np.generic] | None) -> bytes:
    return b"" if window is None else window.tobytes()
