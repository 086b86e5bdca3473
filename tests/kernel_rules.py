"""What the emulated kernels have in common: refusals, and the sums themselves."""

from __future__ import annotations

import itertools
from typing import Any

import torch


class RefusedError(AssertionError):
    """The real library would not take this call."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise RefusedError(message)


def int32(tensor: torch.Tensor | None, name: str) -> list[Any]:
    assert tensor is not None
    require(tensor.dtype == torch.int32, f"{name}: must be int32")
    require(tensor.is_contiguous(), f"{name}: must be contiguous")
    return list(tensor.tolist())


def lens_of(cu_seqlens: torch.Tensor, total: int | None, name: str) -> list[int]:
    bounds = int32(cu_seqlens, name)
    lens = [b - a for a, b in itertools.pairwise(bounds)]
    require(lens, f"{name}: at least one sequence")
    require(bounds[0] == 0 and min(lens) > 0, f"{name}: from 0 upwards, no sequence without a token")
    require(total is None or bounds[-1] == total, f"{name}: ends at {bounds[-1]}, and there are {total} tokens")
    return lens


def used_lens(lens: torch.Tensor | None, name: str) -> list[int]:
    found = int32(lens, name)
    require(found and min(found) > 0, f"{name}: at least one sequence of at least one key")
    return found


def check_max(name: str, value: object, lens: list[int]) -> None:
    require(type(value) is int, f"{name}: a Python int")
    require(value >= max(lens), f"{name}: {value}, and there is a sequence of {max(lens)}")  # type: ignore[operator]


def append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lens: list[int],
    table: torch.Tensor,
    dtype: torch.dtype,
) -> list[int]:
    """Write k, v [N, new, Hkv, D] behind the `lens` keys of each row, in place; the lengths afterwards."""
    require(k.dtype == v.dtype == dtype, "k and v: q's dtype")
    require(k.shape == v.shape and len(k) == len(lens) and k.shape[2:] == k_cache.shape[2:], "k and v: [N, new, Hkv, D]")
    size, after = k_cache.shape[1], [n + k.shape[1] for n in lens]
    check_table(table, after, k_cache)
    for row, (before, end) in enumerate(zip(lens, after, strict=True)):
        slots = [int(table[row, i // size]) * size + i % size for i in range(before, end)]
        k_cache.flatten(0, 1)[slots], v_cache.flatten(0, 1)[slots] = k[row], v[row]
    return after


def descale(scale: torch.Tensor | None, rows: int, heads: int, in_float8: bool) -> torch.Tensor:
    if scale is None or not in_float8:  # in other dtypes the library does not look at it
        return torch.ones(rows, heads)
    require(scale.dtype == torch.float32 and scale.shape == (rows, heads), "descale: float32 [N, Hkv]")
    return scale


def scaled(packed: torch.Tensor, scale: torch.Tensor, lens: list[int]) -> torch.Tensor:
    """Packed [T, H, D] times the scale of its row and key head."""
    group = packed.shape[1] // scale.shape[1]
    return packed.float() * scale.repeat_interleave(torch.tensor(lens), 0).repeat_interleave(group, 1)[:, :, None]


def check_table(table: torch.Tensor, lens: list[int], blocks: torch.Tensor) -> None:
    rows = int32(table, "block_table")
    require(len(rows) == len(lens), "block_table: a row for each sequence")
    require(len(rows[0]) * blocks.shape[1] >= max(lens), "block_table: too short for the longest sequence")
    ids = [block for row in rows for block in row]
    require(min(ids) >= 0 and max(ids) < len(blocks), "block_table: every entry must be a block, those that are not used too")


def packed(k: torch.Tensor, v: torch.Tensor, lens: list[int], table: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if table is None:
        return k, v
    size = k.shape[1]
    slots = [int(row[i // size]) * size + i % size for row, n in zip(table, lens, strict=True) for i in range(n)]
    return k.flatten(0, 1)[slots], v.flatten(0, 1)[slots]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lens_q: list[int],
    lens_k: list[int],
    scale: float | None,
    left: int,
    right: int,
    softcap: float,
) -> torch.Tensor:
    """Aligned bottom-right: query i of n sees keys i + m - n - left to i + m - n + right; -1: no limit. No key: 0."""
    out = torch.empty_like(q)
    scale, group = q.shape[-1] ** -0.5 if scale is None else scale, q.shape[1] // k.shape[1]
    at, key_at = 0, 0
    for n, m in zip(lens_q, lens_k, strict=True):
        keys, values = (t[key_at : key_at + m].float().repeat_interleave(group, dim=1) for t in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q[at : at + n].float(), keys) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        place, key = torch.arange(n)[:, None] + m - n, torch.arange(m)
        hidden = torch.zeros(n, m, dtype=torch.bool)
        if left >= 0:
            hidden |= key < place - left
        if right >= 0:
            hidden |= key > place + right
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
        seen = values.masked_fill(hidden.all(0)[:, None, None], 0.0)  # what nobody sees may be anything
        out[at : at + n] = torch.einsum("hnm,mhd->nhd", probs, seen).to(q.dtype)
        at, key_at = at + n, key_at + m
    return out
