"""Random attention steps whose every slot that no row owns is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from hypothesis import strategies as st

from hf_cb.attention.backend import AttentionBackend
from hf_cb.attention.step import AttentionStep, LayerCall, LayerKV, LayerSpec

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One call of `attend`, and the cache before it."""

    spec: LayerSpec
    step: AttentionStep
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv: LayerKV
    sinks: torch.Tensor | None

    def attend(self, backend: AttentionBackend, kv: LayerKV | None = None) -> torch.Tensor:
        """On a copy of the cache, unless one is given."""
        kv = kv or LayerKV(self.kv.k.clone(), self.kv.v.clone())
        plan = backend.plan(self.step, self.spec)
        return backend.attend(LayerCall(self.q, self.k, self.v, kv, self.spec, self.step, plan, self.sinks))

    def row_slices(self) -> list[slice]:
        """Each row's part of the packed tokens."""
        return [slice(start, stop) for start, stop in pairwise((0, *accumulate(self.step.query_lens)))]

    def select(self, rows: Sequence[int]) -> Case:
        """The same rows with other neighbours: only `rows`, in that order, the slots of all others NaN."""
        tables = [self.step.block_table[row].tolist() for row in rows]
        lens = [(self.step.query_lens[row], self.step.key_lens[row]) for row in rows]
        step = make_step(lens, tables, self.step.block_size)
        kv = _poisoned(self.kv)
        for (query_len, key_len), table in zip(lens, tables, strict=True):
            context = _slots(table, range(key_len - query_len), self.step.block_size)
            for old, new in zip(self.kv, kv, strict=True):
                new.flatten(0, 1)[context] = old.flatten(0, 1)[context]
        slices = self.row_slices()
        q, k, v = (_as_from_hf(torch.cat([packed[slices[row]] for row in rows])) for packed in (self.q, self.k, self.v))
        return replace(self, step=step, q=q, k=k, v=v, kv=kv)


def make_spec(
    num_heads: int = 4, num_kv_heads: int = 2, head_size: int = 16, dtype: torch.dtype = torch.float32, **options: object
) -> LayerSpec:
    facts = {"value_head_size": head_size, "device": CPU, "scale": head_size**-0.5, **options}
    return LayerSpec(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype, **facts)


def make_case(spec: LayerSpec, rows: Sequence[tuple[int, int]], block_size: int = 4, seed: int = 0) -> Case:
    """`rows`: (tokens of this step, tokens stored before) of each. Blocks are dealt at random, some stay free."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(spec.dtype)

    lens = [(query_len, query_len + context) for query_len, context in rows]
    counts = [-(-key_len // block_size) for _, key_len in lens]
    deck = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    tables = [[deck.pop() for _ in range(count)] for count in counts]

    shape = (sum(counts) + 3, block_size, spec.num_kv_heads)
    kv = _poisoned(
        LayerKV(
            torch.empty(*shape, spec.head_size, dtype=spec.dtype), torch.empty(*shape, spec.value_head_size, dtype=spec.dtype)
        )
    )
    for (_, context), table in zip(rows, tables, strict=True):
        for cache in kv:
            cache.flatten(0, 1)[_slots(table, range(context), block_size)] = randn(context, *cache.shape[2:])

    total = sum(query_len for query_len, _ in rows)
    return Case(
        spec=spec,
        step=make_step(lens, tables, block_size),
        q=_as_from_hf(randn(total, spec.num_heads, spec.head_size)),
        k=_as_from_hf(randn(total, spec.num_kv_heads, spec.head_size)),
        v=_as_from_hf(randn(total, spec.num_kv_heads, spec.value_head_size)),
        kv=kv,
        sinks=randn(spec.num_heads) if spec.has_sinks else None,
    )


def make_step(lens: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]], block_size: int) -> AttentionStep:
    """`lens`: (query_len, key_len) of each row."""
    query_lens, key_lens = zip(*lens, strict=True)
    width = max(map(len, tables))
    slots = [
        slot
        for (query_len, key_len), table in zip(lens, tables, strict=True)
        for slot in _slots(table, range(key_len - query_len, key_len), block_size)
    ]
    return AttentionStep(
        cu_seqlens_q=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32),
        seq_lens_k=torch.tensor(key_lens, dtype=torch.int32),
        block_table=torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        query_lens=query_lens,
        key_lens=key_lens,
        max_seqlen_q=max(query_lens),
        max_seqlen_k=max(key_lens),
        block_size=block_size,
    )


@st.composite
def specs(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> LayerSpec:
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    head_size = draw(st.sampled_from([4, 12, 16, 20, 64]))
    return make_spec(
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 3, 7])),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        value_head_size=draw(st.sampled_from([head_size, head_size, 8, 24])),
        dtype=dtype,
        scale=draw(st.sampled_from([head_size**-0.5, 0.3])),
        window=draw(st.none() | st.integers(1, 100)),
        chunk=draw(st.none() | st.integers(1, 100)),
        softcap=draw(st.none() | st.sampled_from([0.7, 3.0])),
        has_sinks=draw(st.booleans()),
    )


_DECODE = st.tuples(st.just(1), st.integers(0, 40) | st.integers(0, 300))
_PREFILL = st.tuples(st.integers(2, 12) | st.integers(2, 150), st.just(0) | st.integers(0, 40) | st.integers(0, 150))


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> Case:
    return make_case(
        draw(specs(dtype)),
        rows=draw(st.lists(_DECODE | _PREFILL, min_size=1, max_size=5)),
        block_size=draw(st.integers(1, 32)),
        seed=draw(st.integers(0, 99)),
    )


def _slots(table: Sequence[int], positions: range, block_size: int) -> list[int]:
    return [table[position // block_size] * block_size + position % block_size for position in positions]


def _poisoned(kv: LayerKV) -> LayerKV:
    return LayerKV(torch.full_like(kv.k, torch.nan), torch.full_like(kv.v, torch.nan))


def _as_from_hf(packed: torch.Tensor) -> torch.Tensor:
    """[T, H, D] with the strides of transformers' attention: a view of [1, H, T, D]."""
    return packed.transpose(0, 1).contiguous()[None][0].transpose(0, 1)
