"""Streams: how the host and the device of a model hand things to each other.

On a CUDA device nothing here waits: inputs go up from pinned memory, sampled tokens come down while the device is already at
the next step, and blocks are swapped on a stream of their own, with events that keep the order. What is computed goes to the
stream that is current on the engine's thread. That is the device's default stream, and with it the one on which a user's code
writes to the weights: so their order is kept, too. On other devices the same calls just copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from typing_extensions import override

_ALIGNMENT = 16  # bytes: of each array in an upload
_DTYPES = {"int32": torch.int32, "int64": torch.int64}


Download = Callable[[], tuple[torch.Tensor, ...]]
"""Tensors on their way to the host: returns them, on the CPU, when they are here."""


class Streams:
    """Of one device: a CPU, or one for which torch's plain calls, which return when the copy is done, are good enough."""

    waits = True
    """Whether a copy is done when the call returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def upload(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Each int32 or int64 array, one or more, as a tensor on the device. They are not to be changed afterwards."""
        return [torch.from_numpy(array).to(self.device) for array in arrays]

    def download(self, *tensors: torch.Tensor) -> Download:
        """Begin to bring tensors of the device to the host, as they are when all that was queued before is done."""
        return lambda: tuple(tensor.cpu() for tensor in tensors)

    def swapping(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """Within it, blocks are copied between `device` and the host: after what was queued on the device before, and before
        what will be queued after it."""
        return contextlib.nullcontext()


class CudaStreams(Streams):
    """Those of a CUDA device, where nothing waits."""

    waits = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._swapping: dict[torch.device, torch.cuda.Stream] = {}

    @override
    def upload(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays])
        host = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=True, device="cpu")
        starts = [0, *ends[:-1].tolist()]
        for array, part in zip(arrays, _parts(arrays, host, starts), strict=True):
            part.numpy()[...] = array
        return _parts(arrays, host.to(self.device, non_blocking=True), starts)

    @override
    def download(self, *tensors: torch.Tensor) -> Download:
        there = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu") for tensor in tensors)
        for target, tensor in zip(there, tensors, strict=True):
            target.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self.device))

        def wait() -> tuple[torch.Tensor, ...]:
            done.synchronize()
            return there

        return wait

    @contextlib.contextmanager
    @override
    def swapping(self, device: torch.device) -> Iterator[None]:
        if device.type != "cuda":
            yield
            return
        computing = torch.cuda.current_stream(device)
        if device not in self._swapping:
            self._swapping[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        swapping = self._swapping[device]
        swapping.wait_stream(computing)  # what is copied out may just be being written
        with torch.cuda.stream(swapping):
            yield
        computing.wait_stream(swapping)  # the blocks are about to be written to, or read


def _parts(arrays: Sequence[np.ndarray], memory: torch.Tensor, starts: Sequence[int]) -> list[torch.Tensor]:
    """The places of the arrays in memory [bytes] uint8, as tensors of their dtypes and shapes."""
    return [
        memory[start : start + array.nbytes].view(_DTYPES[array.dtype.name]).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


def to_device(values: Sequence[float] | np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A few numbers as a tensor, without waiting for the device."""
    host = torch.as_tensor(values, dtype=dtype, device="cpu")
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def streams_of(device: torch.device) -> Streams:
    """The streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else Streams(device)
