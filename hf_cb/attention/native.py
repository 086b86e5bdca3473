"""Attention for CPUs in C++: one call a layer writes the new keys and values and attends, over blocks read in place.

The kernel (csrc/) takes the query heads of a key head together, tiles of queries against tiles of 64 keys, with a running
softmax in float32. Tiles and splits lie at fixed positions of a row, and every product is summed in one order, so a row's bits
depend on nothing but the row: not on its neighbours, the threads, or how its tokens were cut into chunks.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from typing_extensions import override

from hf_cb.attention.backend import AttentionBackend
from hf_cb.attention.step import AttentionStep, LayerCall, LayerSpec
from hf_cb.kernels.extension import BuildError, has_matrix_unit, load

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_HEAD_SIZE = 1024  # kMaxHeadSize in csrc/plan.h


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the layers of one spec share in a step; see csrc/plan.h."""

    pieces: torch.Tensor  # [pieces, 9] int32
    merges: torch.Tensor  # [merges, 4] int32
    partials: torch.Tensor  # [rows, Dv + 2] float32: room for the results of keys that were split


class NativeCPUBackend(AttentionBackend):
    """The compiled kernel, for float32, bfloat16 and float16. It computes in float32."""

    name = "native_cpu"
    fuses = True

    def __init__(self, matrix: bool | None = None) -> None:
        """`matrix`: whether sixteen rows and more of bfloat16 go through AMX; None: where there is that."""
        self._matrix = has_matrix_unit() if matrix is None else matrix

    @override
    def why_not(self, spec: LayerSpec) -> str | None:
        if spec.device.type != "cpu":
            return f"runs on a CPU, not on {spec.device.type}"
        if spec.dtype not in _DTYPES:
            return f"takes float32, bfloat16 or float16, not {str(spec.dtype).removeprefix('torch.')}"
        if max(spec.head_size, spec.value_head_size) > _MAX_HEAD_SIZE:
            return f"takes heads of at most {_MAX_HEAD_SIZE}"
        try:
            load()
        except BuildError as error:
            if error.is_news():
                warnings.warn(f"hf_cb runs without its kernels, several times slower: {error}", RuntimeWarning, stacklevel=2)
            return str(error)
        return None

    @override
    def plan(self, step: AttentionStep, spec: LayerSpec) -> _Plan:
        load()  # for those who didn't ask why_not
        heads = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.value_head_size
        return _Plan(*torch.ops.hf_cb.plan(step.cu_seqlens_q, step.seq_lens_k, *heads, spec.window, spec.chunk))

    @override
    def attend(self, call: LayerCall) -> torch.Tensor:
        out: torch.Tensor = torch.ops.hf_cb.attend(
            *(*call[:3], *call.kv, *arguments(call.step, call.plan), call.sinks, *spec_arguments(call.spec), self._matrix)
        )
        return out


def arguments(step: AttentionStep, plan: object) -> tuple[torch.Tensor, ...]:
    """A step and its plan as the arguments of the kernels."""
    assert isinstance(plan, _Plan)
    return step.slot_mapping, step.block_table, plan.pieces, plan.merges, plan.partials


def spec_arguments(spec: LayerSpec) -> tuple[float, int | None, int | None, float | None]:
    """What the kernels take of a layer: scale, window, chunk, softcap."""
    return spec.scale, spec.window, spec.chunk, spec.softcap
