"""torch's own varlen attention (`torch.nn.attention.varlen`), on CUDA: no package to install.

Its built-in kernel reads no blocks, so the keys and values that the step's rows see are gathered first, once a layer; blocks
may be of any size. `num_splits=1`, where there is such an argument, makes a row independent of the rest of the batch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from typing_extensions import override

from hf_cb.attention.backend import AttentionBackend
from hf_cb.attention.flash import capability, why_not_flash
from hf_cb.attention.step import AttentionStep, LayerCall, LayerSpec


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the layers of a step share: each row's keys, one row after another."""

    slots: torch.Tensor  # [all keys] int64
    cu_seqlens_k: torch.Tensor  # [N + 1] int32


class TorchVarlen(AttentionBackend):
    """Gather, then attend, in the layer's dtype with sums in float32."""

    name = "torch_varlen"

    @override
    def why_not(self, spec: LayerSpec) -> str | None:
        if (reason := why_not_flash(spec)) is not None:
            return reason
        if spec.softcap is not None:
            return "knows no softcap"
        if _varlen_attn() is None:
            return "this torch has no varlen_attn with windows"
        if capability(spec.device) < (8, 0):
            return "takes a GPU of compute capability 8.0 or later"
        return None

    @override
    def can_store(self, spec: LayerSpec) -> bool:
        return True

    @override
    def plan(self, step: AttentionStep, spec: LayerSpec) -> _Plan:
        device, lens = step.block_table.device, step.seq_lens_k.long()
        ends = lens.cumsum(0)
        rows = torch.repeat_interleave(
            torch.arange(len(lens), device=device, dtype=torch.int64), lens, output_size=sum(step.key_lens)
        )
        positions = torch.arange(sum(step.key_lens), device=device, dtype=torch.int64) - (ends - lens)[rows]
        return _Plan(step.slots(rows, positions), functional.pad(ends.int(), (1, 0)))

    @override
    def attend(self, call: LayerCall) -> torch.Tensor:
        spec, step, plan = call.spec, call.step, call.plan
        call.write()
        keys, values = call.kv.gather(plan.slots, spec.dtype)
        if spec.num_heads != spec.num_kv_heads and "enable_gqa" not in _arguments():
            keys, values = (part.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1) for part in (keys, values))
        options = {"enable_gqa": spec.num_heads != spec.num_kv_heads, "num_splits": 1, "scale": spec.scale}
        attend = _varlen_attn()
        assert attend is not None
        out: torch.Tensor = attend(
            call.q.contiguous(),
            keys,
            values,
            step.cu_seqlens_q,
            plan.cu_seqlens_k,
            step.max_seqlen_q,
            step.max_seqlen_k,
            window_size=(-1 if spec.window is None else spec.window - 1, 0),  # 0 to the right: causal
            **{name: value for name, value in options.items() if name in _arguments()},
        )
        return out


@functools.cache
def _varlen_attn() -> Callable[..., Any] | None:
    """torch's function, if it has one that knows windows and scales (2.13 does; earlier ones have fewer arguments)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    names = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"window_size", "scale"} <= set(names) else None


@functools.cache
def _arguments() -> frozenset[str]:
    attend = _varlen_attn()
    return frozenset() if attend is None else frozenset(inspect.signature(attend).parameters)
