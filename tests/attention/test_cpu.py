"""TorchCPUBackend against the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from steps import Case, cases, make_case, make_spec

from hf_cb.attention.cpu import TorchCPUBackend
from hf_cb.attention.reference import ReferenceBackend
from hf_cb.attention.step import LayerKV

BACKEND, ORACLE = TorchCPUBackend(), ReferenceBackend()


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def assert_like_oracle(case: Case, tolerance: float = 2e-5) -> None:
    out, expected = case.attend(BACKEND), case.attend(ORACLE)
    assert out.dtype == case.q.dtype
    assert out.shape == (len(case.q), case.spec.num_heads, case.spec.value_head_size)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)  # NaN is close to nothing


@settings(max_examples=250, deadline=None)
@given(cases())
def test_float32(case: Case) -> None:
    assert_like_oracle(case)


@settings(max_examples=50, deadline=None)
@given(cases(torch.bfloat16))
def test_bfloat16(case: Case) -> None:
    assert_like_oracle(case, tolerance=3e-2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.float64, 2e-5)])
def test_other_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    assert_like_oracle(make_case(make_spec(dtype=dtype), [(1, 30), (70, 20), (1, 3)]), tolerance)


def test_float32_is_exact_to_its_last_digits() -> None:
    case = make_case(make_spec(head_size=64), [(1, 500), (130, 100), (1, 37)])
    wide = [tensor.double() for tensor in (case.q, case.k, case.v, *case.kv)]
    double = Case(replace(case.spec, dtype=torch.float64), case.step, *wide[:3], LayerKV(*wide[3:]), None)
    error = (case.attend(BACKEND).double() - double.attend(BACKEND)).abs().max()
    assert error < 2e-6


def test_many_long_rows_take_several_groups() -> None:
    spec = make_spec(num_heads=8, num_kv_heads=8, head_size=128)
    case = make_case(spec, [(1, 900), (1, 950), (1, 1000), (1, 10), (1, 1020)], block_size=16)
    lengths = [group.length for group in BACKEND.plan(case.step, spec).decode_groups]
    assert len(lengths) > len(set(lengths))  # one length, cut by bytes
    assert_like_oracle(case)


def test_padding_is_bounded() -> None:
    spec = make_spec()
    case = make_case(spec, [(1, context) for context in range(0, 600, 7)], block_size=16)
    gathered = sum(len(group.index) for group in BACKEND.plan(case.step, spec).decode_groups) // spec.num_kv_heads
    # A quarter of the length, or 15 keys of a short row.
    assert gathered <= 1.25 * sum(case.step.key_lens) + 15 * len(case.step.key_lens)


def test_a_window_or_a_chunk_gathers_only_what_is_seen() -> None:
    rows = [(1, 900), (3, 900)]
    for options in ({"window": 20}, {"chunk": 20}):
        spec = make_spec(**options)
        plan = BACKEND.plan(make_case(spec, rows).step, spec)
        assert len(plan.keys) <= spec.num_kv_heads * 32


def test_a_prefill_without_context_gathers_nothing() -> None:
    case = make_case(make_spec(), [(100, 0), (20, 0)])
    assert len(BACKEND.plan(case.step, case.spec).keys) == 0
    assert_like_oracle(case)


def assert_rows_ignore_neighbours(case: Case) -> None:
    """Bit for bit: among all, alone, in the opposite order, and beside a copy of each row that shares a first row."""
    together, slices = case.attend(BACKEND), case.row_slices()
    rows = range(len(slices))
    for order in ([[row] for row in rows], [list(reversed(rows))], [[0, row] for row in rows if row]):
        for chosen in order:
            other = case.select(chosen)
            out = other.attend(BACKEND)
            for row, place in zip(chosen, other.row_slices(), strict=True):
                assert torch.equal(out[place], together[slices[row]])


@settings(max_examples=100, deadline=None)
@given(cases())
def test_a_row_is_bit_equal_whatever_its_neighbours(case: Case) -> None:
    assert_rows_ignore_neighbours(case)


@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_bit_equality_of_many_rows(num_kv_heads: int, threads: int) -> None:
    # With one key head and seven query heads a lone row is a batch of one matrix, which the library computes otherwise.
    spec = make_spec(num_heads=7 * num_kv_heads, num_kv_heads=num_kv_heads, head_size=96)
    assert_rows_ignore_neighbours(make_case(spec, [(1, 11 * i) for i in range(30)] + [(90, 0), (70, 33)], block_size=16))


@settings(max_examples=50, deadline=None)
@given(cases())
def test_writes_its_slots_and_no_other(case: Case) -> None:
    kv = LayerKV(case.kv.k.clone(), case.kv.v.clone())
    case.attend(BACKEND, kv)
    for before, after, new in zip(case.kv, kv, (case.k, case.v), strict=True):
        expected = before.flatten(0, 1).clone()
        for slot, value in zip(case.step.slot_mapping.tolist(), new, strict=True):
            expected[slot] = value
        torch.testing.assert_close(after.flatten(0, 1), expected, rtol=0, atol=0, equal_nan=True)


def test_one_plan_serves_every_layer() -> None:
    spec = make_spec(window=30)
    layers = [make_case(spec, [(1, 50), (40, 7), (1, 3)], seed=seed) for seed in (1, 2)]
    second = replace(layers[1], step=layers[0].step, kv=layers[0].kv)
    expected = [case.attend(BACKEND) for case in (layers[0], second)]
    plan = BACKEND.plan(layers[0].step, spec)
    for case, alone in zip((layers[0], second), expected, strict=True):
        kv = LayerKV(case.kv.k.clone(), case.kv.v.clone())
        assert torch.equal(BACKEND.attend(case.q, case.k, case.v, kv, spec, case.step, plan), alone)


def test_refuses_other_devices() -> None:
    assert BACKEND.why_not(make_spec()) is None
    assert BACKEND.why_not(make_spec(device=torch.device("meta"))) == "runs on a CPU, not on meta"
