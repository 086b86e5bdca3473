"""A strict emulator of torch's CUDA graphs on a CPU: what is captured is run again as it was, over the same memory.

Of a capture, the ops and the kernels launched are noted with their arguments: Python values as they were, tensors by their
memory. Nothing that it computes stays: what was written to is put back, what was made is spoilt until a replay. A replay runs
exactly these ops, so that a value or an address that has changed meanwhile gives wrong numbers, as on a device, and spoils what
other graphs of the same pool have made. What a device could not capture (an op that the host waits for, numbers from the host)
ends the capture with an error.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hf_cb.attention import flash
from hf_cb.runtime import graphs

aten = torch.ops.aten


class CaptureError(RuntimeError):
    """What the driver calls an operation that is not permitted while a stream is capturing."""


@dataclass
class Device:
    """The emulated device: its memory, and what happened on it, in order."""

    free: int = 1 << 30
    events: list[str] = field(default_factory=list)
    broken: bool = False  # every capture fails
    _local: threading.local = field(default_factory=threading.local)

    @property
    def recorder(self) -> _Recorder | None:
        """Of the capture on this thread."""
        return getattr(self._local, "recorder", None)

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a kernel of a library: one thing to a graph, whatever the emulated kernel does inside."""
        with _disable_current_modes():
            out = function(*args, **kwargs)
            if self.recorder is not None:
                self.recorder.note(function, args, kwargs, out)
        return out


@dataclass
class _Call:
    function: Callable[..., Any]
    args: Any  # tensors by their memory, the rest as it was
    kwargs: Any
    made: list[tuple[int, torch.Tensor]]  # those of the results that are new memory, by their place


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _refuse(func, args)
        if func._can_decompose():  # in inference mode, what is made of other ops comes as a whole
            with self:
                return func.decompose(*args, **kwargs)
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                    self._before.append((_memory(value), value.clone()))
        out = func(*args, **kwargs)
        self.note(func, args, kwargs, out, is_mutable=func._schema.is_mutable)
        return out

    def note(self, function: Any, args: Any, kwargs: Any, out: Any, is_mutable: bool = False) -> None:
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        results = list(enumerate(_tensors(out)))
        made = [(i, _memory(t)) for i, t in results if t.untyped_storage().data_ptr() not in given]
        if made or is_mutable or not results:  # else a view: the same memory for good
            args, kwargs = _pytree.tree_map_only(torch.Tensor, _memory, (args, kwargs))
            self.calls.append(_Call(function, args, kwargs, made))

    def undo(self) -> None:
        """The capture computes nothing: put back what it wrote to."""
        for tensor, before in reversed(self._before):
            tensor.copy_(before)
        self._before.clear()


def _refuse(func: Any, args: Any) -> None:
    packet = func.overloadpacket
    waits = {aten._local_scalar_dense, aten.item, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten._unique2}
    by_mask = packet is aten.index and any(i is not None and i.dtype == torch.bool for i in args[1])
    unknown_size = packet is aten.repeat_interleave and func._overloadname == "Tensor"
    if packet in waits or by_mask or unknown_size:
        raise CaptureError(f"operation not permitted when stream is capturing: the host waits for {func}")
    if packet is aten.lift_fresh:
        raise CaptureError("operation not permitted when stream is capturing: numbers come from the host")


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, whatever becomes of the tensor."""
    return tensor.detach()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _spoil(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


class _Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.calls: list[_Call] | None = None
        self.pool: _Pool | None = None
        self.taken = 0

    def __del__(self) -> None:
        self._device.free += self.taken

    def replay(self) -> None:
        assert self.calls is not None, "nothing was captured"
        assert self.pool is not None
        assert self._device.recorder is None, "a replay inside of a capture"
        self._device.events.append("replay")
        with torch.inference_mode():
            self.pool.spoil_others(self)
            for call in self.calls:
                out = _tensors(call.function(*call.args, **call.kwargs))
                for place, tensor in call.made:
                    tensor.copy_(out[place])


class _Pool:
    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[_Graph] = weakref.WeakSet()

    def spoil_others(self, running: _Graph | None) -> None:
        for graph in self.graphs:
            for call in (graph.calls or []) if graph is not running else []:
                for _, tensor in call.made:
                    _spoil(tensor)


_lock = threading.Lock()


def _capture(device: Device) -> Callable[..., Any]:
    """torch.cuda.graph."""

    @contextlib.contextmanager
    def graph(
        cuda_graph: _Graph, pool: _Pool | None = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "an error of any other thread's"
        assert _lock.acquire(blocking=False), "one capture at a time"
        device.events.append("capture")
        recorder = _Recorder()
        device._local.recorder = recorder
        try:
            with recorder:
                yield
            if device.broken:
                raise CaptureError("CUDA error: operation failed due to a previous error during capture")
        finally:
            device._local.recorder = None
            with torch.inference_mode():
                recorder.undo()
            _lock.release()
        cuda_graph.calls, cuda_graph.pool = recorder.calls, pool or _Pool()
        cuda_graph.pool.graphs.add(cuda_graph)
        cuda_graph.taken = sum(tensor.nbytes for call in recorder.calls for _, tensor in call.made)
        device.free -= cuda_graph.taken
        with torch.inference_mode():
            cuda_graph.pool.spoil_others(None)

    return graph


def _outside_of_captures(device: Device, function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        if device.recorder is not None and not torch._C._len_torch_dispatch_stack() == 0:
            raise CaptureError(f"operation not permitted when stream is capturing: the host waits in {function.__name__}")
        return function(*args, **kwargs)

    return checked


@contextlib.contextmanager
def emulated(**settings: Any) -> Iterator[Device]:
    """Inside, `torch.cuda` captures graphs on the CPU, and kernels of the emulated libraries are launched."""
    device, patch = Device(**settings), pytest.MonkeyPatch()
    kernel = flash._function
    patch.setattr(graphs, "DEVICES", ("cpu",))
    patch.setattr(flash, "_function", lambda *names: lambda *a, **k: device.launch(kernel(*names), *a, **k))
    stream = SimpleNamespace(wait_stream=lambda other: device.events.append("wait"))
    for name, value in {
        "CUDAGraph": lambda: _Graph(device),
        "graph": _capture(device),
        "graph_pool_handle": _Pool,
        "Stream": lambda device: stream,
        "current_stream": lambda device: stream,
        "stream": contextlib.nullcontext,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda _: (device.free, 1 << 30),
    }.items():
        patch.setattr(torch.cuda, name, value)
    for name in ("tolist", "numpy"):  # these read a CPU's memory without an op
        patch.setattr(torch.Tensor, name, _outside_of_captures(device, getattr(torch.Tensor, name)))
    try:
        yield device
    finally:
        patch.undo()
