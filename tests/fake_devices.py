"""Devices that this machine lacks: tensors that say they are on one, are as strict about it as real ones, and are computed on
the CPU.

An operation whose tensors are on different devices raises what torch raises; like there, only a CPU tensor of no dimensions,
and indices on the CPU, go with any. So a model that accelerate has put on two of them works if everything that meets has been
moved.

torch knows the kind for the rest of the process: this is for programs, not for the process of the tests.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from hf_cb import continuous
from hf_cb.hf.calls import native
from hf_cb.worker import Worker

KIND = "far"
_INDEXED = ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_")  # indices may be on the CPU


class _Module(backend_registration._DummyBackendModule):
    """What torch asks `torch.far`."""

    def device_count(self) -> int:
        return 2

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def empty_cache(self) -> None:
        """There is none."""


class Placed(torch.Tensor):
    """A tensor on a device that isn't there, over its numbers on the CPU."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, device: torch.device | None = None, requires_grad: bool = False) -> Placed:
        if device is None:  # accelerate makes a parameter by the type of the old one, which is this
            return torch.nn.Parameter(numbers, requires_grad)  # type: ignore[return-value]
        placed: Placed = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, numbers.shape, numbers.stride(), numbers.storage_offset(), dtype=numbers.dtype, device=device
        )
        placed.numbers = numbers
        return placed

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operation, args, kwargs or {})

    def tolist(self) -> Any:
        return self.numbers.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placed({self.numbers}, {self.device})"

    __torch_function__ = torch._C._disabled_torch_function_impl


class Devices(TorchDispatchMode):
    """Inside, on this thread, tensors can be made on and moved to devices of KIND."""

    def __enter__(self) -> Devices:
        # torch.tensor(.., device=..) shall make its tensor on the CPU, and then move it by an operation that we see.
        self._before: bool = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._before)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operation, args, kwargs or {})


def _run(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = operation._schema.name.partition("::")[2]
    named = [item for item in tree_iter((args, kwargs)) if isinstance(item, torch.device)]  # where the result is to be
    device = named[0] if named else _common_device(name, args, kwargs)
    if device.type == KIND:
        device = torch.device(KIND, device.index or 0)
    plain = tree_map_only(torch.device, lambda d: torch.device("cpu") if d.type == KIND else d, (args, kwargs))
    plain = tree_map_only(Placed, lambda placed: placed.numbers, plain)
    if "pin_memory" in plain[1]:  # which would ask for a real device
        plain[1]["pin_memory"] = False
    out = operation(*plain[0], **plain[1])
    if named and isinstance(args[0], torch.Tensor) and out is plain[0][0]:  # moved to where it was, or not
        if args[0].device == device:
            return args[0]
        out = out.clone()
    if operation._schema.is_mutable:
        return args[0] if name.endswith("_") else kwargs.get("out", args[0])
    if device.type != KIND:
        return out
    return tree_map_only(torch.Tensor, lambda numbers: Placed(numbers, device), out)


def _common_device(name: str, args: Any, kwargs: dict[str, Any]) -> torch.device:
    tensors = [item for item in tree_iter((args, kwargs)) if isinstance(item, torch.Tensor)]
    if name == "copy_":
        return tensors[0].device
    main = tensors[:1] if name in _INDEXED else tensors
    devices = {tensor.device for tensor in main if tensor.dim() or tensor.device.type != "cpu"}
    if name in _INDEXED:
        devices |= {tensor.device for tensor in tensors[1:] if tensor.device.type != "cpu"}
    if len(devices) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but got {sorted(map(str, devices))} in {name}")
    return next(iter(devices), torch.device("cpu"))


@contextlib.contextmanager
def devices() -> Iterator[None]:
    """Inside, on this thread and on those of engines, there are devices of KIND."""
    run = Worker._run

    @functools.wraps(run)
    def placed_run(worker: Worker) -> None:
        with Devices():
            run(worker)

    backend_registration._setup_privateuseone_for_python_backend(KIND, _Module())  # type: ignore[no-untyped-call]
    with (
        mock.patch.object(Worker, "_run", placed_run),
        mock.patch.object(native, "mode_of_caller", return_value=None),  # ours stands for the machine's devices
        mock.patch.object(continuous, "undisturbed", contextlib.nullcontext),
        Devices(),
    ):
        yield
