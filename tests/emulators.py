"""Strict emulators of flash-attn 2, 3 and 4 and of torch's varlen attention: the same names, signatures, defaults and refusals,
computed in torch on a CPU.

What a real library would refuse, or compute wrongly without a word, raises here. Only the device, and float32 where a test
allows it, are taken as they come.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_rules import (
    RefusedError,
    append,
    attend,
    check_max,
    check_table,
    descale,
    int32,
    lens_of,
    packed,
    require,
    scaled,
    used_lens,
)

from hf_cb.attention import flash, varlen

__all__ = ["FLOAT8", "HALF", "Library", "RefusedError", "installed"]

HALF = (torch.float16, torch.bfloat16)
FLOAT8 = torch.float8_e4m3fn


@dataclass
class Library:
    """What was installed, and the calls that it got."""

    dtypes: tuple[torch.dtype, ...] = HALF
    calls: list[str] = field(default_factory=list)

    # -- flash_attn ---------------------------------------------------------------------------------------------------------

    def fa2_varlen(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.calls.append("flash_attn_2")
        self._check_heads(q, k, v)
        require(isinstance(window_size, tuple) and all(isinstance(w, int) for w in window_size), "window_size: two ints")
        require(k.dim() == 4 or block_table is None, "a block table goes with k [num_blocks, block_size, Hkv, D]")
        lens_q = lens_of(cu_seqlens_q, len(q), "cu_seqlens_q")
        lens_k = lens_of(cu_seqlens_k, None if block_table is not None else len(k), "cu_seqlens_k")
        require(len(lens_q) == len(lens_k), "cu_seqlens_q and cu_seqlens_k are of one length")
        check_max("max_seqlen_q", max_seqlen_q, lens_q)
        check_max("max_seqlen_k", max_seqlen_k, lens_k)
        if block_table is not None:
            require(k.shape[1] % 256 == 0, f"block size {k.shape[1]}: must be divisible by 256")
            check_table(block_table, lens_k, k)
        if max_seqlen_q == 1:
            require(all(n == 1 for n in lens_q), "with one query at the most, every sequence must have exactly one")
            causal = False
        left, right = window_size
        right = 0 if causal else right
        keys, values = packed(k, v, lens_k, block_table)
        return attend(q, keys, values, lens_q, lens_k, softmax_scale, left, right, softcap)

    def fa2_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        rotary_cos: torch.Tensor | None = None,
        rotary_sin: torch.Tensor | None = None,
        cache_seqlens: torch.Tensor | int | None = None,
        cache_batch_idx: torch.Tensor | None = None,
        cache_leftpad: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: torch.Tensor | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> torch.Tensor:
        self.calls.append("flash_attn_2 decode")
        require(q.dim() == 4, "q: [N, Sq, H, D], one Sq for all")
        self._check_heads(q.flatten(0, 1), k_cache, v_cache)
        require(block_table is not None and cache_seqlens is not None, "over blocks: block_table and cache_seqlens")
        require(cache_batch_idx is None, "cache_batch_idx does not go with a block_table")
        require(cache_leftpad is None, "cache_leftpad does not go with a block_table")
        require(isinstance(cache_seqlens, torch.Tensor), "rows of different lengths: a tensor of them")
        require(k_cache.shape[1] % 256 == 0, f"block size {k_cache.shape[1]}: must be divisible by 256")
        assert isinstance(cache_seqlens, torch.Tensor)
        assert block_table is not None
        lens = int32(cache_seqlens, "cache_seqlens")
        require(len(lens) == len(q), "cache_seqlens: one for each row of q")
        require((k is None) == (v is None), "k and v are appended together")
        if k is not None and v is not None:
            lens = append(k, v, k_cache, v_cache, lens, block_table, q.dtype)
        require(min(lens) > 0, "a row without a key")
        check_table(block_table, lens, k_cache)
        left, right = window_size
        right = 0 if causal else right
        keys, values = packed(k_cache, v_cache, lens, block_table)
        out = attend(q.flatten(0, 1), keys, values, [q.shape[1]] * len(q), lens, softmax_scale, left, right, softcap)
        return out.view(q.shape)

    # -- flash_attn_interface -------------------------------------------------------------------------------------------------

    def fa3_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        qv: torch.Tensor | None = None,
        rotary_cos: torch.Tensor | None = None,
        rotary_sin: torch.Tensor | None = None,
        cache_seqlens: torch.Tensor | None = None,
        cache_batch_idx: torch.Tensor | None = None,
        cache_leftpad: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k_new: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: torch.Tensor | None = None,
        q_descale: torch.Tensor | None = None,
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: torch.Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> torch.Tensor:
        self.calls.append("flash_attn_3")
        in_float8 = q.dtype == FLOAT8
        self._check_heads(q, k_cache, v_cache, (*self.dtypes, FLOAT8))
        require(not in_float8 or q.shape[-1] % 16 == 0, f"head size {q.shape[-1]}: a multiple of 16 in float8")
        require(
            page_table is not None and cache_seqlens is not None, "packed queries over blocks: page_table and cache_seqlens"
        )
        require(cu_seqlens_q is not None and max_seqlen_q is not None, "packed queries: cu_seqlens_q and max_seqlen_q")
        assert page_table is not None
        assert cu_seqlens_q is not None
        lens_q, lens_k = lens_of(cu_seqlens_q, len(q), "cu_seqlens_q"), used_lens(cache_seqlens, "cache_seqlens")
        require(len(lens_q) == len(lens_k), "a length of the cache for each sequence")
        check_max("max_seqlen_q", max_seqlen_q, lens_q)
        check_table(page_table, lens_k, k_cache)
        left, right = window_size
        keys, values = packed(k_cache, v_cache, lens_k, page_table)
        scales = [descale(scale, len(lens_k), k_cache.shape[2], in_float8) for scale in (q_descale, k_descale, v_descale)]
        if in_float8:  # the kernel gives bfloat16
            q = scaled(q, scales[0], lens_q).bfloat16()
            keys, values = scaled(keys, scales[1], lens_k).bfloat16(), scaled(values, scales[2], lens_k).bfloat16()
        return attend(q, keys, values, lens_q, lens_k, softmax_scale, left, 0 if causal else right, softcap)

    # -- flash_attn.cute ------------------------------------------------------------------------------------------------------

    def fa4_varlen(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        qv: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        seqused_q: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
        softcap: float = 0.0,
    ) -> tuple[torch.Tensor, None]:
        self.calls.append("flash_attn_4")
        require(qv is None, "the fourth argument is qv: give the others by keyword")
        self._check_heads(q, k, v)
        require(cu_seqlens_q is not None, "packed queries: cu_seqlens_q")
        assert cu_seqlens_q is not None
        require(page_table is not None and seqused_k is not None, "a page_table needs seqused_k")
        require(cu_seqlens_k is None, "a page_table refuses cu_seqlens_k")
        require(all(w is None or w >= 0 for w in window_size), "no window is None, not -1")
        assert page_table is not None
        lens_q, lens_k = lens_of(cu_seqlens_q, len(q), "cu_seqlens_q"), used_lens(seqused_k, "seqused_k")
        check_max("max_seqlen_q", max_seqlen_q, lens_q)
        check_max("max_seqlen_k", max_seqlen_k, lens_k)
        check_table(page_table, lens_k, k)
        left = -1 if window_size[0] is None else window_size[0]
        right = 0 if causal else -1 if window_size[1] is None else window_size[1]
        keys, values = packed(k, v, lens_k, page_table)
        return attend(q, keys, values, lens_q, lens_k, softmax_scale, left, right, softcap), None

    # -- torch.nn.attention.varlen --------------------------------------------------------------------------------------------

    def varlen_attn(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        self.calls.append("torch_varlen")
        self._check_heads(query, key, value)
        require(block_table is None, "the built-in kernel reads no blocks")
        require(enable_gqa or query.shape[1] == key.shape[1], "fewer key heads need enable_gqa")
        require(query.is_contiguous() and key.is_contiguous() and value.is_contiguous(), "takes contiguous tensors")
        assert cu_seq_k is not None
        lens_q, lens_k = lens_of(cu_seq_q, len(query), "cu_seq_q"), lens_of(cu_seq_k, len(key), "cu_seq_k")
        check_max("max_q", max_q, lens_q)
        check_max("max_k", max_k, lens_k)
        return attend(query, key, value, lens_q, lens_k, scale, *window_size, 0.0)

    def _check_heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtypes: tuple[torch.dtype, ...] | None = None
    ) -> None:
        allowed = q.dtype in (dtypes or self.dtypes) and q.dtype == k.dtype == v.dtype
        require(allowed, f"dtype: fp16 or bf16, one for all; got {q.dtype} and {k.dtype}")
        require(q.dim() == 3, "q: [Tq, H, D]")
        require(k.shape == v.shape, "k and v: one shape")
        require(all(t.stride(-1) == 1 for t in (q, k, v)), "the last dimension must be contiguous")
        require(0 not in (*q.shape, *k.shape), "nothing may be of size 0")
        size = q.shape[-1]
        require(size == k.shape[-1] and size <= 256 and size % 8 == 0, f"head size {size}: at most 256, a multiple of 8")
        require(q.shape[1] % k.shape[-2] == 0, "the number of key heads must divide that of query heads")


@contextlib.contextmanager
def installed(name: str, dtypes: tuple[torch.dtype, ...] = HALF) -> Iterator[Library]:
    """Inside, the backend `name` finds its library, on the CPU."""
    library, patch = Library(dtypes), pytest.MonkeyPatch()

    def module(path: str, **members: object) -> None:
        made = ModuleType(path)
        made.__dict__.update(members)
        made.__spec__ = SimpleNamespace(name=path)  # type: ignore[assignment]
        patch.setitem(sys.modules, path, made)

    cute = {"flash_attn_varlen_func": library.fa4_varlen}
    module("flash_attn", flash_attn_varlen_func=library.fa2_varlen, flash_attn_with_kvcache=library.fa2_with_kvcache)
    module("flash_attn.cute", **cute)
    if name == "flash_attn_3":
        module("flash_attn_interface", flash_attn_with_kvcache=library.fa3_with_kvcache)
    distributions = {"flash_attn_2": "flash-attn", "flash_attn_4": "flash-attn-4"}
    patch.setattr(flash, "installed", lambda distribution: distribution == distributions.get(name))
    for where in (flash, varlen):
        patch.setattr(where, "capability", lambda _: (9, 0))
    patch.setattr(varlen, "_varlen_attn", lambda: library.varlen_attn)
    patch.setattr(flash, "DEVICES", ("cpu",))
    patch.setattr(flash, "DTYPES", dtypes)
    flash._function.cache_clear()
    varlen._arguments.cache_clear()
    try:
        yield library
    finally:
        patch.undo()
        flash._function.cache_clear()
        varlen._arguments.cache_clear()
