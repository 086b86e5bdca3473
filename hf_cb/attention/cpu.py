"""Attention for CPUs in plain torch: rows of like work grouped into batched products.

Keys and values are gathered head by head, `[rows * Hkv, L, D]`: batched products run two to three times faster on that than
on keys that lie token by token. Query heads that share a key head are rows of one matrix, so that no key is repeated.

A row's bits do not depend on its neighbours. The library's products round differently for different shapes, but alike for
every matrix of a batch, whatever the size of the batch (two or more; see `_twin`). So the shape that a row is computed in
depends on that row alone: decode rows are padded to one of a few lengths, and a prefill row is computed by itself.

Half precision promises no bits (the model's own products don't keep them either), and there the calls cost more than the sums.
So its decode rows form fewer, looser groups, which go through torch's fused attention token by token as they lie in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from hf_cb.attention.step import AttentionStep, LayerKV, LayerSpec

_Ints = npt.NDArray[np.int64]

_TILE = 64  # queries of a prefill row that are computed together: small enough to skip most of the masked half
_MIN_LENGTH = 16  # decode rows are padded to multiples of this, or of a quarter of the power of two below their length
_LOOSE_RATIO, _LOOSE_KEYS = 1.35, 32  # how much longer than its shortest row a loose group's longest may be: either is enough
_GROUP_BYTES = 2 << 20  # keys gathered for one group of decode rows: beyond a core's cache, larger groups gain nothing


@dataclass(frozen=True, slots=True)
class _Mask:
    """Added to the scores' columns from `start` on: -inf where a query may not look."""

    start: int
    values: torch.Tensor  # broadcasts to [rows, Hq, queries, columns]


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Rows with one query each, padded to the same number of keys."""

    start: int  # these rows in _Plan.decode_tokens
    stop: int
    index: torch.Tensor  # int64: [rows * Hkv * length], see _head_index; in a loose group slots, [rows * length]
    length: int
    masks: tuple[_Mask, ...]


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some consecutive queries of one row, and the keys that they see, counted from the row's first."""

    start: int  # packed index of the first query
    stop: int
    first_key: int
    end_key: int
    masks: tuple[_Mask, ...]


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    """A row with several queries. Without an index, all that they see is among this step's own keys."""

    start: int
    stop: int
    index: torch.Tensor | None  # [Hkv * keys] int64, see _head_index
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the layers of one spec share in a step."""

    decode_tokens: torch.Tensor  # int64: packed indices of the decode rows' queries, in the order of the groups
    decode_groups: tuple[_DecodeGroup, ...]
    prefill_rows: tuple[_PrefillRow, ...]
    keys: torch.Tensor  # [largest index, D]: every gather writes here, so that a step touches fresh memory once
    values: torch.Tensor  # [largest index, Dv]


class TorchCPUBackend:
    """Grouped batched products, for any option, dtype and head size."""

    name = "torch_cpu"

    def why_not(self, spec: LayerSpec) -> str | None:
        """Refuses what is not on a CPU."""
        return None if spec.device.type == "cpu" else f"runs on a CPU, not on {spec.device.type}"

    def plan(self, step: AttentionStep, spec: LayerSpec) -> _Plan:
        """Group the rows and find the slots of the keys that each group sees."""
        slots = _all_slots(step)
        starts = [0, *accumulate(step.query_lens)]
        decode = [row for row, query_len in enumerate(step.query_lens) if query_len == 1]
        order, groups = _group_decode(decode, slots, step, spec)
        prefill = tuple(
            _plan_prefill(row, starts[row], slots, step, spec) for row, query_len in enumerate(step.query_lens) if query_len > 1
        )
        indices = [group.index for group in groups] + [row.index for row in prefill if row.index is not None]
        largest = max(map(len, indices), default=0)
        return _Plan(
            decode_tokens=torch.tensor([starts[row] for row in order], dtype=torch.int64, device="cpu"),
            decode_groups=groups,
            prefill_rows=prefill,
            keys=torch.empty(largest, spec.head_size, dtype=spec.dtype, device="cpu"),
            values=torch.empty(largest, spec.value_head_size, dtype=spec.dtype, device="cpu"),
        )

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: LayerKV,
        spec: LayerSpec,
        step: AttentionStep,
        plan: object,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend.attend. Scores and probabilities are in the layer's dtype, the softmax sums in float32."""
        assert isinstance(plan, _Plan)
        kv.write(step, k, v)
        out = q.new_empty(len(q), spec.num_heads, spec.value_head_size)
        if plan.decode_groups:
            attend = _attend_loosely if _is_loose(spec) else _attend_decode
            out.index_copy_(0, plan.decode_tokens, attend(q, kv, spec, plan, sinks))
        for row in plan.prefill_rows:
            if row.index is None:
                row_k = k[row.start : row.stop].transpose(0, 1).contiguous()
                row_v = v[row.start : row.stop].transpose(0, 1).contiguous()
            else:
                row_k, row_v = _gather(kv, row.index, len(row.index) // spec.num_kv_heads, plan)
            for tile in row.tiles:
                out[tile.start : tile.stop] = _attend_tile(q, row_k, row_v, tile, spec, sinks)
        return out


def _attend_decode(q: torch.Tensor, kv: LayerKV, spec: LayerSpec, plan: _Plan, sinks: torch.Tensor | None) -> torch.Tensor:
    """q [T, Hq, D] -> [n, Hq, Dv]: the queries of plan.decode_tokens."""
    queries = q.index_select(0, plan.decode_tokens).mul_(spec.scale)
    out = q.new_empty(len(queries), spec.num_heads, spec.value_head_size)
    heads = spec.num_heads // spec.num_kv_heads
    for group in plan.decode_groups:
        keys, values = _gather(kv, group.index, group.length, plan)
        group_q = queries[group.start : group.stop].view(-1, heads, spec.head_size)
        group_out = out[group.start : group.stop].view(-1, heads, spec.value_head_size)
        _attend(group_q, keys, values, 1, group.masks, spec, sinks, group_out)
    return out


def _attend_loosely(q: torch.Tensor, kv: LayerKV, spec: LayerSpec, plan: _Plan, sinks: torch.Tensor | None) -> torch.Tensor:
    """As _attend_decode, in loose groups."""
    assert sinks is None  # see _is_loose
    queries = q.index_select(0, plan.decode_tokens)
    out = q.new_empty(len(queries), spec.num_heads, spec.value_head_size)
    for group in plan.decode_groups:
        rows, span = group.stop - group.start, slice(group.start, group.stop)
        keys, values = (
            torch.index_select(cache.flatten(0, 1), 0, group.index).view(rows, group.length, *cache.shape[2:]).transpose(1, 2)
            for cache in kv
        )
        # Query heads that share a key head are queries of one head: [rows, Hkv, G, D].
        group_q = queries[span].view(rows, spec.num_kv_heads, -1, spec.head_size)
        mask = group.masks[0].values if group.masks else None
        out[span] = functional.scaled_dot_product_attention(group_q, keys, values, mask, scale=spec.scale).flatten(1, 2)
    return out


def _is_loose(spec: LayerSpec) -> bool:
    return spec.dtype.itemsize < 4 and spec.softcap is None and not spec.has_sinks


def _attend_tile(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tile: _Tile, spec: LayerSpec, sinks: torch.Tensor | None
) -> torch.Tensor:
    """q [T, Hq, D], the row's keys [Hkv, L, D] and values [Hkv, L, Dv] -> [queries of the tile, Hq, Dv]."""
    count = tile.stop - tile.start
    # [count, Hq, D] -> [Hkv, G * count, D]
    tile_q = q[tile.start : tile.stop].mul(spec.scale).transpose(0, 1).reshape(spec.num_kv_heads, -1, spec.head_size)
    out = q.new_empty(spec.num_kv_heads, tile_q.shape[1], spec.value_head_size)
    seen = slice(tile.first_key, tile.end_key)
    _attend(tile_q, keys[:, seen], values[:, seen], count, tile.masks, spec, sinks, out)
    return out.view(spec.num_heads, count, spec.value_head_size).transpose(0, 1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    num_queries: int,
    masks: tuple[_Mask, ...],
    spec: LayerSpec,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """The products: q [B, G * num_queries, D] (scaled), k [B, L, D], v [B, L, Dv] -> out [B, G * num_queries, Dv]."""
    scores = torch.bmm(q, k.transpose(1, 2))
    if spec.softcap is not None:
        scores = scores.float().div_(spec.softcap).tanh_().mul_(spec.softcap)
    by_head = scores.view(-1, spec.num_heads, num_queries, k.shape[1])
    for mask in masks:
        by_head[..., mask.start : mask.start + mask.values.shape[-1]].add_(mask.values)
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*by_head.shape[:3], 1)
        scores = torch.cat([scores, column.reshape(*scores.shape[:2], 1)], dim=-1)
    weights = torch.softmax(scores, -1)[..., : k.shape[1]]
    torch.bmm(weights.to(v.dtype), v, out=out)


def _gather(kv: LayerKV, index: torch.Tensor, length: int, plan: _Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [B, length, D] and values [B, length, Dv] in the plan's memory: valid until the next gather."""
    keys, values = plan.keys[: len(index)], plan.values[: len(index)]
    torch.index_select(kv.k.flatten(0, 2), 0, index, out=keys)
    torch.index_select(kv.v.flatten(0, 2), 0, index, out=values)
    return keys.view(-1, length, keys.shape[1]), values.view(-1, length, values.shape[1])


def _group_decode(
    rows: list[int], slots: _Ints, step: AttentionStep, spec: LayerSpec
) -> tuple[list[int], tuple[_DecodeGroup, ...]]:
    """The decode rows in the order of their groups, and the groups."""
    last = {row: step.key_lens[row] - 1 for row in rows}
    first = {row: _first_visible(last[row], spec) for row in rows}
    lengths = {row: _padded_length(last[row] + 1 - first[row]) for row in rows}
    order: list[int] = []
    groups: list[_DecodeGroup] = []
    for members in _split(sorted(rows, key=lengths.__getitem__), lengths, spec):
        length = lengths[members[-1]]
        ends = np.array([last[row] for row in members])[:, None]
        positions = np.array([first[row] for row in members])[:, None] + np.arange(length)
        # Padding repeats the row's last slot: what is gathered is always the row's own, so no NaN of a free slot gets in.
        own = slots[np.array(members)[:, None], np.minimum(positions, ends)]
        index = torch.from_numpy(own.ravel()) if _is_loose(spec) else _head_index(own, spec)
        beyond = torch.from_numpy(positions > ends)[:, None, None]
        mask = _Mask(0, torch.zeros(beyond.shape, dtype=spec.dtype, device="cpu").masked_fill_(beyond, -torch.inf))
        groups.append(_DecodeGroup(len(order), len(order) + len(members), index, length, (mask,) if bool(beyond.any()) else ()))
        order += members
    return order, tuple(groups)


def _split(rows: list[int], lengths: dict[int, int], spec: LayerSpec) -> Iterator[list[int]]:
    """Cut rows that are sorted by length into runs of equal length whose keys take no more than _GROUP_BYTES; or loosely."""
    begin = 0
    while _is_loose(spec) and begin < len(rows):
        shortest = lengths[rows[begin]]
        longest = max(_LOOSE_RATIO * shortest, shortest + _LOOSE_KEYS)
        end = next((i for i in range(begin, len(rows)) if lengths[rows[i]] > longest), len(rows))
        yield rows[begin:end]
        begin = end
    while begin < len(rows):
        length = lengths[rows[begin]]
        most = max(1, _GROUP_BYTES // (length * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize))
        end = begin + 1
        while end < len(rows) and end - begin < most and lengths[rows[end]] == length:
            end += 1
        yield _twin(rows[begin:end], spec)
        begin = end


def _twin(rows: list[int], spec: LayerSpec) -> list[int]:
    """A batch of one matrix runs through other code, which rounds differently: compute such a row twice."""
    return rows * 2 if len(rows) * spec.num_kv_heads == 1 else rows


def _padded_length(length: int) -> int:
    """Up to the next of four lengths per power of two: at most a quarter more keys, a few dozen distinct lengths."""
    step = max(_MIN_LENGTH, 1 << (length - 1).bit_length() >> 3)
    return -(-length // step) * step


def _plan_prefill(row: int, start: int, slots: _Ints, step: AttentionStep, spec: LayerSpec) -> _PrefillRow:
    """Cut a row's queries into tiles; `start` is the packed index of the first."""
    end = step.key_lens[row]
    position = end - step.query_lens[row]
    base = _first_visible(position, spec)
    index = None
    if base < position:
        index = _head_index(slots[row : row + 1, base:end], spec)
    tiles = tuple(
        _Tile(
            start=start + tile_position - position,
            stop=start + tile_end - position,
            first_key=(first := _first_visible(tile_position, spec)) - base,
            end_key=tile_end - base,
            masks=_tile_masks(tile_position, tile_end, first, spec),
        )
        for tile_position, tile_end in _tile_bounds(position, end, spec)
    )
    return _PrefillRow(start, start + end - position, index, tiles)


def _tile_bounds(position: int, end: int, spec: LayerSpec) -> Iterator[tuple[int, int]]:
    """Positions [from, to) of each tile. None straddles two chunks, so that chunks need no mask."""
    while position < end:
        stop = min(position + _TILE, end)
        if spec.chunk is not None:
            stop = min(stop, (position // spec.chunk + 1) * spec.chunk)
        yield position, stop
        position = stop


def _tile_masks(position: int, end: int, first: int, spec: LayerSpec) -> tuple[_Mask, ...]:
    """Masks for the queries at [position, end) over the keys at [first, end): only the corners that not all of them see."""
    query = torch.arange(position, end, dtype=torch.int64, device="cpu")[:, None]
    masks = []
    if end - position > 1:
        masks.append(_corner(position - first, torch.arange(position, end, dtype=torch.int64, device="cpu") > query, spec))
    if spec.window is not None and end - spec.window > first:
        masks.append(
            _corner(0, torch.arange(first, end - spec.window, dtype=torch.int64, device="cpu") <= query - spec.window, spec)
        )
    return tuple(masks)


def _corner(start: int, hidden: torch.Tensor, spec: LayerSpec) -> _Mask:
    return _Mask(start, torch.zeros(hidden.shape, dtype=spec.dtype, device="cpu").masked_fill_(hidden, -torch.inf))


def _first_visible(position: int, spec: LayerSpec) -> int:
    """The first position that a query at `position` sees."""
    first = 0
    if spec.window is not None:
        first = max(first, position - spec.window + 1)
    if spec.chunk is not None:
        first = max(first, position // spec.chunk * spec.chunk)
    return first


def _all_slots(step: AttentionStep) -> _Ints:
    """[N, max_blocks * block_size]: the slot of every position of every row."""
    table = step.block_table.numpy().astype(np.int64)
    return (table[:, :, None] * step.block_size + np.arange(step.block_size)).reshape(len(table), -1)


def _head_index(slots: _Ints, spec: LayerSpec) -> torch.Tensor:
    """Slots [rows, L] -> [rows * Hkv * L] int64: where their heads lie in a cache flattened to [slots * Hkv, D]."""
    heads = np.arange(spec.num_kv_heads)[:, None]
    return torch.from_numpy((slots[:, None] * spec.num_kv_heads + heads).ravel())
