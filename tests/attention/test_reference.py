"""The oracle against torch's own attention, and against a definition written out in Python numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from steps import Case, cases, make_case, make_spec
from torch.nn import functional

from hf_cb.attention.reference import ReferenceBackend
from hf_cb.attention.step import LayerKV

ORACLE = ReferenceBackend()


def row_tensors(case: Case, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [n, Hq, D], k [m, Hkv, D], v [m, Hkv, Dv] of one row, found token by token."""
    kv = LayerKV(case.kv.k.clone(), case.kv.v.clone())
    for token, slot in enumerate(case.step.slot_mapping.tolist()):
        block, offset = divmod(slot, case.step.block_size)
        kv.k[block, offset], kv.v[block, offset] = case.k[token], case.v[token]
    table, block_size = case.step.block_table[row].tolist(), case.step.block_size
    places = [(table[position // block_size], position % block_size) for position in range(case.step.key_lens[row])]
    k, v = (torch.stack([cache[place] for place in places]) for cache in kv)
    return case.q[case.row_slices()[row]], k, v


def by_hand(case: Case, row: int, query: int, head: int) -> list[float]:
    """The definition, in Python numbers: the output [Dv] of one query and head."""
    spec = case.spec
    q, k, v = row_tensors(case, row)
    position = case.step.key_lens[row] - case.step.query_lens[row] + query
    kv_head = head * spec.num_kv_heads // spec.num_heads
    weights: dict[int, float] = {}
    for key in range(position + 1):
        if spec.window is not None and position - key >= spec.window:
            continue
        if spec.chunk is not None and key // spec.chunk != position // spec.chunk:
            continue
        score = sum(a * b for a, b in zip(q[query, head].tolist(), k[key, kv_head].tolist(), strict=True)) * spec.scale
        if spec.softcap is not None:
            score = spec.softcap * math.tanh(score / spec.softcap)
        weights[key] = math.exp(score)
    total = sum(weights.values()) + (0.0 if case.sinks is None else math.exp(case.sinks[head].item()))
    return [
        sum(weight / total * v[key, kv_head, i].item() for key, weight in weights.items()) for i in range(spec.value_head_size)
    ]


@pytest.mark.parametrize("rows", [[(9, 0)], [(1, 8)], [(4, 7), (1, 0), (1, 12), (6, 0)]])
def test_equals_torch_attention(rows: list[tuple[int, int]]) -> None:
    case = make_case(make_spec(num_heads=6, num_kv_heads=2), rows)
    out = case.attend(ORACLE)
    for row, place in enumerate(case.row_slices()):
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in row_tensors(case, row))
        causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=causal, scale=case.spec.scale, enable_gqa=True)
        torch.testing.assert_close(out[place], expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


OPTIONS = [
    {},
    {"window": 3},
    {"window": 1},
    {"chunk": 4},
    {"chunk": 5, "window": 2},
    {"softcap": 0.8},
    {"has_sinks": True},
    {"value_head_size": 3},
    {"window": 4, "softcap": 0.5, "has_sinks": True, "scale": 0.9},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_the_definition(options: dict[str, object]) -> None:
    case = make_case(make_spec(num_heads=4, num_kv_heads=2, head_size=8, **options), [(5, 6), (1, 9), (1, 0)], block_size=3)
    out = case.attend(ORACLE)
    for row, place in enumerate(case.row_slices()):
        for query in range(case.step.query_lens[row]):
            for head in range(4):
                expected = torch.tensor(by_hand(case, row, query, head))
                torch.testing.assert_close(out[place][query, head], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [options for options in OPTIONS[1:] if "value_head_size" not in options], ids=str)
def test_every_option_matters(options: dict[str, object]) -> None:
    rows = [(5, 6), (1, 9)]
    plain, with_option = (make_case(make_spec(**chosen), rows).attend(ORACLE) for chosen in ({}, options))
    assert (plain - with_option).abs().max() > 1e-2


def test_masks_are_aligned_bottom_right() -> None:
    # The second of two queries over five keys sees all of them, the first all but the last.
    case = make_case(make_spec(num_heads=1, num_kv_heads=1), [(2, 3)])
    q, k, v = row_tensors(case, 0)
    out = case.attend(ORACLE)
    for query, seen in enumerate((4, 5)):
        weights = torch.softmax(k[:seen, 0] @ q[query, 0] * case.spec.scale, dim=0)
        torch.testing.assert_close(out[query, 0], weights @ v[:seen, 0])


@settings(max_examples=50, deadline=None)
@given(cases())
def test_reads_only_owned_slots_and_writes_only_the_new(case: Case) -> None:
    kv = LayerKV(case.kv.k.clone(), case.kv.v.clone())
    assert case.attend(ORACLE, kv).isfinite().all()
    for before, after, new in zip(case.kv, kv, (case.k, case.v), strict=True):
        expected = before.flatten(0, 1).clone()
        for slot, value in zip(case.step.slot_mapping.tolist(), new, strict=True):
            expected[slot] = value
        torch.testing.assert_close(after.flatten(0, 1), expected, rtol=0, atol=0, equal_nan=True)


def test_returns_the_dtype_of_the_queries_and_computes_in_float32() -> None:
    spec = make_spec(dtype=torch.bfloat16)
    case = make_case(spec, [(3, 20)])
    wide = [tensor.float() for tensor in (case.q, case.k, case.v, *case.kv)]
    float32 = Case(make_spec(), case.step, *wide[:3], LayerKV(*wide[3:]), None)
    assert torch.equal(case.attend(ORACLE), float32.attend(ORACLE).bfloat16())
