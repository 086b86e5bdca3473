"""FlashAttention 2, 3 and 4 (Dao, 2023; Shah et al., 2024): varlen kernels that read keys and values from blocks, on CUDA.

Each library has its own way to say the same thing; what they have in common is here in the class they share. Prefill and decode
rows go in one call. Layers with sinks, or that attend in chunks, these kernels don't know: the next backend takes such a model.
"""

from __future__ import annotations

import abc
import functools
import importlib
import importlib.util
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.nn import functional
from typing_extensions import override

from hf_cb.attention.backend import AttentionBackend
from hf_cb.attention.step import AttentionStep, LayerCall, LayerKV, LayerSpec, saturated

DEVICES: tuple[str, ...] = ("cuda",)
DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
_MAX_HEAD_SIZE = 256


def why_not_flash(spec: LayerSpec) -> str | None:
    """What all kernels of this family refuse."""
    is_odd_size = spec.head_size > _MAX_HEAD_SIZE or spec.head_size % 8 != 0
    reasons = {
        f"runs on {' or '.join(DEVICES)}, not on {spec.device.type}": spec.device.type not in DEVICES,
        f"takes float16 or bfloat16, not {str(spec.dtype).removeprefix('torch.')}": spec.dtype not in DTYPES,
        "takes keys and values of one head size": spec.head_size != spec.value_head_size,
        f"takes head sizes that are multiples of 8, at most {_MAX_HEAD_SIZE}": is_odd_size,
        "takes a whole number of query heads for each key head": spec.num_heads % spec.num_kv_heads != 0,
        "knows no sinks": spec.has_sinks,
        "knows no chunks": spec.chunk is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


@functools.cache
def installed(distribution: str) -> bool:
    """Whether a package is installed. FlashAttention 4 puts modules into the namespace of FlashAttention 2, so that a module of
    that name proves nothing."""
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


class _Flash(AttentionBackend):
    """What the libraries have in common. The kernels compute in the layer's dtype, and sum in float32."""

    captures = True  # lengths are read from tensors, all but the largest ones, which a graph is kept under

    @override
    def why_not(self, spec: LayerSpec) -> str | None:
        return why_not_flash(spec) or self._why_not_here(spec.device)

    @abc.abstractmethod
    def _why_not_here(self, device: torch.device) -> str | None:
        """Why this library does not run on this machine; None: it does."""

    @override
    def plan(self, step: AttentionStep, spec: LayerSpec) -> torch.Tensor:
        """Where the keys of each row would begin if they were packed, [N + 1] int32; needed even when they lie in blocks."""
        return functional.pad(step.seq_lens_k.cumsum(0, dtype=torch.int32), (1, 0))

    @override
    def attend(self, call: LayerCall) -> torch.Tensor:
        call.write()
        q = call.q if call.q.stride(-1) == 1 else call.q.contiguous()  # the kernels take any strides but the last
        return self._attend(q, call.kv, call)

    @abc.abstractmethod
    def _attend(self, q: torch.Tensor, kv: LayerKV, call: LayerCall) -> torch.Tensor:
        """The library's own call, over keys and values that are written already."""


def _common(spec: LayerSpec, no_limit: int | None = -1) -> dict[str, Any]:
    """The arguments that all libraries call the same. `no_limit`: one's word for it in a window, which is how many keys to the
    left and to the right of its own a query sees."""
    window = (no_limit, no_limit) if spec.window is None else (spec.window - 1, 0)
    return {"softmax_scale": spec.scale, "causal": True, "window_size": window, "softcap": spec.softcap or 0.0}


class FlashAttention2(_Flash):
    """The package flash-attn 2: Ampere and later. Its blocks hold multiples of 256 tokens."""

    name = "flash_attn_2"
    block_multiple = block_size = 256

    def _why_not_here(self, device: torch.device) -> str | None:
        if not installed("flash-attn"):
            return "flash-attn is not installed"
        if capability(device) < (8, 0):
            return "takes a GPU of compute capability 8.0 or later"
        return None

    def _attend(self, q: torch.Tensor, kv: LayerKV, call: LayerCall) -> torch.Tensor:
        step, common = call.step, _common(call.spec)
        if step.max_seqlen_q > 1:
            return _function("flash_attn", "flash_attn_varlen_func")(
                q,
                kv.k,
                kv.v,
                cu_seqlens_q=step.cu_seqlens_q,
                cu_seqlens_k=call.plan,
                max_seqlen_q=step.max_seqlen_q,
                max_seqlen_k=step.max_seqlen_k,
                block_table=step.block_table,
                **common,
            )
        # One query each. This function cuts long rows over the whole GPU, which the varlen one does not over blocks.
        # It could write the new keys and values as well. But it would find their places by the block table, and only the
        # step's slots say where a row is to write.
        decode = _function("flash_attn", "flash_attn_with_kvcache")
        return decode(q[:, None], *kv, cache_seqlens=step.seq_lens_k, block_table=step.block_table, **common)[:, 0]


class FlashAttention3(_Flash):
    """The module flash_attn_interface: Hopper. Its varlen function has no block table; that for a cache does, with prompts and
    single queries alike. It reads float8 where the queries are in float8 too, and then gives bfloat16."""

    name = "flash_attn_3"
    block_size = 64  # its tiles' keys divide by this, so that they are copied whole

    def _why_not_here(self, device: torch.device) -> str | None:
        if importlib.util.find_spec("flash_attn_interface") is None:
            return "flash_attn_interface is not installed"
        if capability(device)[0] != 9:
            return "takes a GPU of compute capability 9"
        return None

    @override
    def can_store(self, spec: LayerSpec) -> bool:
        return spec.kv_dtype == torch.float8_e4m3fn and spec.head_size % 16 == 0

    def _attend(self, q: torch.Tensor, kv: LayerKV, call: LayerCall) -> torch.Tensor:
        step, spec = call.step, call.spec
        out = _function("flash_attn_interface", "flash_attn_with_kvcache")(
            saturated(q, kv.k.dtype),  # no descale arguments: all scales are 1
            kv.k,
            kv.v,
            cache_seqlens=step.seq_lens_k,
            page_table=step.block_table,
            cu_seqlens_q=step.cu_seqlens_q,
            max_seqlen_q=step.max_seqlen_q,
            **_common(spec),
        )
        return out.to(spec.dtype)


class FlashAttention4(_Flash):
    """The package flash-attn-4: Hopper and Blackwell. Everything by keyword: its fourth positional argument is another one."""

    name = "flash_attn_4"
    block_size = 128  # the fastest

    def _why_not_here(self, device: torch.device) -> str | None:
        if not installed("flash-attn-4"):
            return "flash-attn-4 is not installed"
        if capability(device)[0] not in (9, 10, 11):
            return "takes blocks on GPUs of compute capability 9, 10 or 11"
        return None

    def _attend(self, q: torch.Tensor, kv: LayerKV, call: LayerCall) -> torch.Tensor:
        step = call.step
        return _function("flash_attn.cute", "flash_attn_varlen_func")(
            q=q,
            k=kv.k,
            v=kv.v,
            cu_seqlens_q=step.cu_seqlens_q,
            max_seqlen_q=step.max_seqlen_q,
            seqused_k=step.seq_lens_k,
            max_seqlen_k=step.max_seqlen_k,
            page_table=step.block_table,
            **_common(call.spec, no_limit=None),
        )[0]


@functools.cache
def _function(module: str, name: str) -> Callable[..., torch.Tensor]:
    """A library's function. It gives a tensor, or a tuple that begins with one."""
    function: Callable[..., torch.Tensor] = getattr(importlib.import_module(module), name)
    return function
