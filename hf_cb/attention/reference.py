"""The oracle: attention as its definition says, one row and one head at a time. Slow, obvious, any device, any option."""

from __future__ import annotations

import torch
from typing_extensions import override

from hf_cb.attention.backend import AttentionBackend
from hf_cb.attention.step import AttentionStep, LayerCall, LayerSpec


class ReferenceBackend(AttentionBackend):
    """Serves every layer, on every device. What the other backends are tested against, and the last resort."""

    name = "reference"

    @override
    def why_not(self, spec: LayerSpec) -> str | None:
        return None

    @override
    def can_store(self, spec: LayerSpec) -> bool:
        return True

    @override
    def plan(self, step: AttentionStep, spec: LayerSpec) -> None:
        pass  # layers share nothing here

    @override
    def attend(self, call: LayerCall) -> torch.Tensor:
        q, kv, spec, step, sinks = call.q, call.kv, call.spec, call.step, call.sinks
        call.write()
        cached_k, cached_v = kv.k.flatten(0, 1), kv.v.flatten(0, 1)  # computes in float32

        out = q.new_empty(len(q), spec.num_heads, spec.value_head_size)
        group = spec.num_heads // spec.num_kv_heads
        start = 0
        for row, (query_len, key_len) in enumerate(zip(step.query_lens, step.key_lens, strict=True)):
            slots = _slots(step, row, key_len)
            visible = _visible(query_len, key_len, spec)
            for head in range(spec.num_heads):
                out[start : start + query_len, head] = _attend_head(
                    q[start : start + query_len, head].float(),
                    cached_k[slots, head // group].float(),
                    cached_v[slots, head // group].float(),
                    visible,
                    spec,
                    None if sinks is None else sinks[head].float(),
                ).to(q.dtype)
            start += query_len
        return out


def _slots(step: AttentionStep, row: int, key_len: int) -> torch.Tensor:
    """[key_len] int64: where the row's tokens lie in the flattened cache."""
    positions = torch.arange(key_len, device=step.block_table.device, dtype=torch.int64)
    return step.block_table[row, positions // step.block_size].long() * step.block_size + positions % step.block_size


def _visible(query_len: int, key_len: int, spec: LayerSpec) -> torch.Tensor:
    """[query_len, key_len] bool: which keys each query sees."""
    key = torch.arange(key_len, device=spec.device, dtype=torch.int64)
    query = key[key_len - query_len :, None]
    visible = key <= query
    if spec.window is not None:
        visible &= key > query - spec.window
    if spec.chunk is not None:
        visible &= key >= query // spec.chunk * spec.chunk
    return visible


def _attend_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, spec: LayerSpec, sink: torch.Tensor | None
) -> torch.Tensor:
    """One row, one head: q [n, D], k [m, D], v [m, Dv], visible [n, m] -> [n, Dv]."""
    scores = q @ k.T * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.expand(len(q), 1)], dim=1)
    return torch.softmax(scores, dim=1)[:, : len(k)] @ v
