"""Attention in plain torch on any device: the last resort before the oracle, for what no kernel takes.

Rows with one query each are padded to the longest of their group and go through one batched product; a row with several queries
goes by itself, a tile of queries at a time, over the keys that the tile sees. Any dtype, head size and option.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from typing_extensions import override

from hf_cb.attention.backend import AttentionBackend
from hf_cb.attention.step import AttentionStep, LayerCall, LayerSpec

_TILE = 256  # queries of a row that are computed together
_RATIO = 2  # a group's longest row has at most so many times the keys of its shortest


@dataclass(frozen=True, slots=True)
class _Part:
    """Queries that are computed together, with the keys that they see."""

    queries: torch.Tensor  # [rows, n] int64: packed indices
    slots: torch.Tensor  # [rows, m] int64
    hidden: torch.Tensor  # [rows, 1, n, m] bool: where a query may not look


class GroupedTorch(AttentionBackend):
    """Grouped products in the layer's dtype, the softmax in float32, for any layer."""

    name = "torch_grouped"

    @override
    def why_not(self, spec: LayerSpec) -> str | None:
        return "the meta device has no memory" if spec.device.type == "meta" else None

    @override
    def can_store(self, spec: LayerSpec) -> bool:
        return True

    @override
    def plan(self, step: AttentionStep, spec: LayerSpec) -> tuple[_Part, ...]:
        starts = [0, *accumulate(step.query_lens)]
        parts = [_decode(rows, starts, step, spec) for rows in _groups(step)]
        for row, query_len in enumerate(step.query_lens):
            if query_len > 1:
                tiles = range(0, query_len, _TILE)
                parts += [_tile(row, starts[row], first, min(first + _TILE, query_len), step, spec) for first in tiles]
        return tuple(parts)

    @override
    def attend(self, call: LayerCall) -> torch.Tensor:
        q, kv, spec = call.q, call.kv, call.spec
        call.write()
        out = q.new_empty(len(q), spec.num_heads, spec.value_head_size)
        for part in call.plan:
            keys, values = (x.transpose(1, 2) for x in kv.gather(part.slots, spec.dtype))  # [rows, Hkv, m, D]
            out[part.queries] = _attend(q[part.queries].transpose(1, 2), keys, values, part.hidden, spec, call.sinks).transpose(
                1, 2
            )
        return out


def _groups(step: AttentionStep) -> list[list[int]]:
    """Rows with one query, those of like length together."""
    rows = sorted((i for i, n in enumerate(step.query_lens) if n == 1), key=lambda i: step.key_lens[i])
    groups: list[list[int]] = []
    for row in rows:
        if groups and step.key_lens[row] <= _RATIO * max(16, step.key_lens[groups[-1][0]]):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _first_seen(position: int, spec: LayerSpec) -> int:
    by_window = 0 if spec.window is None else position - spec.window + 1
    by_chunk = 0 if spec.chunk is None else position // spec.chunk * spec.chunk
    return max(0, by_window, by_chunk)


def _decode(rows: list[int], starts: list[int], step: AttentionStep, spec: LayerSpec) -> _Part:
    device = step.block_table.device
    firsts = [_first_seen(step.key_lens[row] - 1, spec) for row in rows]
    most = max(step.key_lens[row] - first for row, first in zip(rows, firsts, strict=True))
    positions = torch.tensor(firsts, device=device, dtype=torch.int64)[:, None] + torch.arange(
        most, device=device, dtype=torch.int64
    )
    last = torch.tensor([step.key_lens[row] - 1 for row in rows], device=device, dtype=torch.int64)[:, None]
    index = torch.tensor(rows, device=device, dtype=torch.int64)[:, None]
    return _Part(
        queries=torch.tensor([[starts[row]] for row in rows], device=device, dtype=torch.int64),
        slots=step.slots(index, positions.minimum(last)),  # a row's padding is its last key once more, hidden
        hidden=(positions > last)[:, None, None],
    )


def _tile(row: int, start: int, first: int, end: int, step: AttentionStep, spec: LayerSpec) -> _Part:
    device, before = step.block_table.device, step.key_lens[row] - step.query_lens[row]
    positions = torch.arange(_first_seen(before + first, spec), before + end, device=device, dtype=torch.int64)
    query = torch.arange(before + first, before + end, device=device, dtype=torch.int64)[:, None]
    hidden = positions > query
    if spec.window is not None:
        hidden = hidden | (positions <= query - spec.window)
    if spec.chunk is not None:
        hidden = hidden | (positions < query // spec.chunk * spec.chunk)
    index = torch.tensor([[row]], device=device, dtype=torch.int64)
    queries = torch.arange(start + first, start + end, device=device, dtype=torch.int64)[None]
    return _Part(queries, step.slots(index, positions[None]), hidden[None, None])


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, spec: LayerSpec, sinks: torch.Tensor | None
) -> torch.Tensor:
    """q [rows, Hq, n, D], k [rows, Hkv, m, D], v [rows, Hkv, m, Dv] -> [rows, Hq, n, Dv]. Query heads of a key head are rows of
    one matrix, so that no key is repeated."""
    rows, heads, n, size = q.shape
    group = heads // k.shape[1]
    scores = (q.reshape(rows, -1, group * n, size) @ k.transpose(-1, -2)).float() * spec.scale
    scores = scores.view(rows, heads, n, -1)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(rows, heads, n, 1)], dim=-1)
    probs = scores.softmax(dim=-1)[..., : k.shape[2]].to(v.dtype)
    return (probs.reshape(rows, -1, group * n, k.shape[2]) @ v).view(rows, heads, n, -1)
