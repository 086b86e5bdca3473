"""NativeCPUBackend against the oracle, and what it promises about bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import Case, cases, make_case, make_spec, make_step

from hf_cb.attention.grouped import GroupedTorch
from hf_cb.attention.native import NativeCPUBackend
from hf_cb.attention.reference import ReferenceBackend
from hf_cb.attention.step import LayerCall, LayerKV

BACKEND, ORACLE = NativeCPUBackend(), ReferenceBackend()
THROUGH_MATRIX = NativeCPUBackend(matrix=True)  # the same door without AMX leads to other kernels, over the same layout

TOLERANCES = [(torch.float32, 2e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
LONG = [(1, 1500), (1, 511), (1, 512), (200, 900), (3, 1100), (1, 0), (600, 0)]  # on both sides of every tile and split


@pytest.fixture(autouse=True, scope="module")
def _built() -> None:
    assert BACKEND.why_not(make_spec()) is None, "these tests need a C++ compiler"


def assert_like_oracle(case: Case, tolerance: float = 2e-5) -> None:
    out, expected = case.attend(BACKEND), case.attend(ORACLE)
    assert out.dtype == case.q.dtype
    assert out.shape == (len(case.q), case.spec.num_heads, case.spec.value_head_size)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)  # NaN is close to nothing


@settings(max_examples=250, deadline=None)
@given(cases())
def test_float32(case: Case) -> None:
    assert_like_oracle(case)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES[1:], ids=str)
def test_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    @settings(max_examples=75, deadline=None)
    @given(cases(dtype))
    def check(case: Case) -> None:
        assert_like_oracle(case, tolerance)

    check()


@pytest.mark.parametrize("options", [{}, {"window": 700}, {"chunk": 640}, {"has_sinks": True, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_that_are_split(options: dict[str, object], dtype: torch.dtype) -> None:
    case = make_case(make_spec(head_size=32, dtype=dtype, **options), LONG, block_size=16)
    assert len(BACKEND.plan(case.step, case.spec).merges)
    assert_like_oracle(case, 2e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("size", "value_size"), [(1, 1), (17, 33), (33, 17), (40, 72), (80, 80), (96, 128), (192, 128), (256, 256), (576, 512)]
)
def test_head_sizes(size: int, value_size: int, dtype: torch.dtype, tolerance: float) -> None:
    for options in ({}, {"window": 5, "softcap": 3.0, "has_sinks": True}):
        spec = make_spec(head_size=size, value_head_size=value_size, dtype=dtype, **options)
        assert_like_oracle(make_case(spec, [(1, 70), (9, 90), (1, 0)]), tolerance)


@settings(max_examples=75, deadline=None)
@given(cases(torch.bfloat16))
def test_through_the_matrix_units_door(case: Case) -> None:
    torch.testing.assert_close(case.attend(THROUGH_MATRIX), case.attend(ORACLE), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("sizes", [(64, 64), (33, 17), (80, 128), (192, 128), (1, 1)], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 40, "softcap": 3.0}, {"chunk": 50}, {"has_sinks": True}], ids=str)
def test_long_prompts_through_it(sizes: tuple[int, int], options: dict[str, object]) -> None:
    """One query head a key head, and three, and twenty: rows that don't fill a tile, at every place of a piece."""
    for heads in ((2, 2), (6, 2), (20, 1)):
        spec = make_spec(*heads, head_size=sizes[0], value_head_size=sizes[1], dtype=torch.bfloat16, **options)
        case = make_case(spec, [(200, 900), (1, 70), (17, 3), (40, 0), (15, 600)])
        out = case.attend(THROUGH_MATRIX)
        torch.testing.assert_close(out, case.attend(ORACLE), rtol=1e-2, atol=1e-2)
        for row, place in enumerate(case.row_slices()):  # neighbours change nothing here either
            assert torch.equal(case.select([row]).attend(THROUGH_MATRIX), out[place])


@pytest.mark.parametrize("heads", [(1, 1), (40, 1), (97, 1), (200, 2)])
def test_groups_of_heads(heads: tuple[int, int]) -> None:
    assert_like_oracle(make_case(make_spec(*heads), [(1, 70), (5, 600)]))


def test_float32_is_exact_to_its_last_digits() -> None:
    case = make_case(make_spec(head_size=64), [(1, 500), (130, 1100), (1, 37)])
    wide = [tensor.double() for tensor in (case.q, case.k, case.v, *case.kv)]
    double = Case(replace(case.spec, dtype=torch.float64), case.step, *wide[:3], LayerKV(*wide[3:]), None)
    error = (case.attend(BACKEND).double() - double.attend(GroupedTorch())).abs().max()
    assert error < 1e-6


def test_scores_far_apart() -> None:
    # Each key outweighs all before it by far, and the weights of the lowest are less than the smallest float.
    case = make_case(make_spec(num_heads=1, num_kv_heads=1, head_size=16, scale=1.0), [(40, 600)])
    case = replace(case, q=case.q * 60)
    assert_like_oracle(case, 1e-4)


def assert_rows_ignore_neighbours(case: Case) -> None:
    """Bit for bit: among all, alone, in the opposite order, and beside a first row."""
    together, slices = case.attend(BACKEND), case.row_slices()
    rows = range(len(slices))
    for order in ([[row] for row in rows], [list(reversed(rows))], [[0, row] for row in rows if row]):
        for chosen in order:
            other = case.select(chosen)
            out = other.attend(BACKEND)
            for row, place in zip(chosen, other.row_slices(), strict=True):
                assert torch.equal(out[place], together[slices[row]])


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([torch.float32, torch.bfloat16]).flatmap(cases))
def test_a_row_is_bit_equal_whatever_its_neighbours(case: Case) -> None:
    assert_rows_ignore_neighbours(case)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 1, "num_heads": 7, "window": 600}], ids=str)
def test_bit_equality_of_long_rows_among_many(options: dict[str, int]) -> None:
    rows = LONG + [(1, 11 * i) for i in range(30)]
    assert_rows_ignore_neighbours(make_case(make_spec(**options), rows, block_size=16))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    case = make_case(make_spec(num_heads=9, num_kv_heads=3, head_size=64, dtype=dtype), LONG, block_size=16)
    outs = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        outs.append(case.attend(BACKEND))
    assert all(torch.equal(out, outs[0]) for out in outs[1:])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_row_is_bit_equal_however_it_is_cut_into_chunks(data: st.DataObject) -> None:
    """Each query has the same bits in a prompt, in a chunk of it, and alone as if it had been decoded."""
    length = data.draw(st.integers(2, 150) | st.integers(500, 700))
    options = data.draw(st.sampled_from([{}, {"window": 70}, {"chunk": 50}, {"has_sinks": True, "softcap": 2.0}]))
    spec = make_spec(num_heads=6, num_kv_heads=2, dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])), **options)
    case = make_case(spec, [(length, 0)], block_size=data.draw(st.integers(3, 20)))
    whole = case.attend(BACKEND)
    table = case.step.block_table.tolist()
    kv = LayerKV(case.kv.k.clone(), case.kv.v.clone())
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=4)))
    cuts = sorted({0, *cuts, *(cut + 1 for cut in cuts[:1]), length})
    for start, stop in pairwise(cuts):
        step = make_step([(stop - start, stop)], table, case.step.block_size)
        part = slice(start, stop)
        chunk = replace(case, step=step, q=case.q[part], k=case.k[part], v=case.v[part])
        assert torch.equal(chunk.attend(BACKEND, kv), whole[part])


@settings(max_examples=50, deadline=None)
@given(cases())
def test_writes_its_slots_and_no_other(case: Case) -> None:
    kv = LayerKV(case.kv.k.clone(), case.kv.v.clone())
    case.attend(BACKEND, kv)
    for before, after, new in zip(case.kv, kv, (case.k, case.v), strict=True):
        expected = before.flatten(0, 1).clone()
        expected[case.step.slot_mapping] = new
        torch.testing.assert_close(after.flatten(0, 1), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_out_of_sight_are_not_read(dtype: torch.dtype) -> None:
    for options in ({"window": 20}, {"chunk": 32}):
        case = make_case(make_spec(dtype=dtype, **options), [(1, 900), (5, 905)], block_size=4)
        expected = case.attend(BACKEND)
        kv = LayerKV(case.kv.k.clone(), case.kv.v.clone())
        for table in case.step.block_table[:, :200]:  # positions before 800
            kv.k[table], kv.v[table] = torch.nan, torch.nan
        assert torch.equal(case.attend(BACKEND, kv), expected)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES, ids=str)
def test_queries_that_see_nothing_of_a_tile_beside_some_that_do(dtype: torch.dtype, tolerance: float) -> None:
    """What earlier work left where their weights belong, no number perhaps, is not taken for them."""
    spec = make_spec(num_heads=2, num_kv_heads=2, dtype=dtype)
    crossing = make_case(replace(spec, window=1), [(6, 60)], block_size=16)
    for seed in range(30):
        make_case(spec, [(6, 20)], block_size=16, seed=seed).attend(BACKEND)
        assert_like_oracle(crossing, tolerance)


def test_one_plan_serves_every_layer() -> None:
    spec = make_spec(window=600)
    layers = [make_case(spec, LONG, seed=seed) for seed in (1, 2)]
    second = replace(layers[1], step=layers[0].step, kv=layers[0].kv)
    expected = [case.attend(BACKEND) for case in (layers[0], second)]
    plan = BACKEND.plan(layers[0].step, spec)
    for case, alone in zip((layers[0], second), expected, strict=True):
        kv = LayerKV(case.kv.k.clone(), case.kv.v.clone())
        assert torch.equal(BACKEND.attend(LayerCall(case.q, case.k, case.v, kv, spec, case.step, plan)), alone)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": torch.device("meta")}, "runs on a CPU, not on meta"),
        ({"dtype": torch.float64}, "takes float32, bfloat16 or float16, not float64"),
        ({"head_size": 1025}, "takes heads of at most 1024"),
    ],
    ids=str,
)
def test_what_it_refuses(options: dict[str, object], reason: str) -> None:
    assert BACKEND.why_not(make_spec(**options)) == reason


@pytest.mark.parametrize("hidden", [64, 130, 512])
def test_keys_that_weigh_nothing_before_those_that_do(hidden: int) -> None:
    """Scores of minus infinity from the first key on."""
    case = make_case(make_spec(num_heads=2, num_kv_heads=1, head_size=16), [(1, 700)])
    q, cache_k = case.q.abs() + 0.1, case.kv.k.clone()
    table = case.step.block_table[0].long()
    for position in range(hidden):
        block, offset = divmod(position, case.step.block_size)
        cache_k[table[block], offset] = -torch.inf
    case = replace(case, q=q, kv=LayerKV(cache_k, case.kv.v))
    out = case.attend(BACKEND)
    assert out.isfinite().all()
    torch.testing.assert_close(out, case.attend(GroupedTorch()), rtol=1e-5, atol=1e-5)


# -- arguments that lead nowhere ---------------------------------------------------------------------------------------------


def bad_calls() -> dict[str, tuple[str, Callable[[dict[str, Any]], None]]]:
    """By name: what the message begins with, and the change."""

    def put(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
        return lambda call: call.__setitem__(name, value(call[name]) if callable(value) else value)

    def put_at(name: str, place: tuple[int, int] | int, value: int) -> Callable[[dict[str, Any]], None]:
        def change(call: dict[str, Any]) -> None:
            call[name] = call[name].clone()
            call[name][place] = value

        return change

    def without_slots(call: dict[str, Any]) -> None:
        call["k_cache"], call["v_cache"] = (call[name][:, :0] for name in ("k_cache", "v_cache"))

    def without_blocks(call: dict[str, Any]) -> None:
        call["k_cache"], call["v_cache"] = (call[name][:0] for name in ("k_cache", "v_cache"))

    def without_tokens(call: dict[str, Any]) -> None:
        call |= {name: call[name][:0] for name in ("q", "k", "v", "slots")}

    return {
        "no slots": ("k_cache, v_cache:", without_slots),
        "no blocks": ("k_cache, v_cache:", without_blocks),
        "no tokens": ("pieces, merges, partials:", without_tokens),
        "no rows": ("pieces, merges, partials:", put("table", lambda table: table[:0])),
        "short table": ("pieces, merges, partials:", put("table", lambda table: table[:, :1].contiguous())),
        "a block beyond": ("table:", put_at("table", (0, 0), 10**6)),
        "a block before": ("table:", put_at("table", (1, 0), -1)),
        "a slot beyond": ("slots:", put_at("slots", 0, 10**9)),
        "a slot before": ("slots:", put_at("slots", 1, -1)),
        "another row": ("pieces, merges, partials:", put_at("pieces", (0, 0), 99)),
        "another token": ("pieces, merges, partials:", put_at("pieces", (0, 1), 10**6)),
        "more queries": ("pieces, merges, partials:", put_at("pieces", (0, 2), 2**31 - 1)),
        "other heads": ("pieces, merges, partials:", put_at("pieces", (0, 5), 9)),
        "other keys": ("pieces, merges, partials:", put_at("pieces", (0, 7), 10**6)),
        "another partial": ("pieces, merges, partials:", put_at("pieces", (0, 8), 2**31 - 1)),
        "no partials": ("pieces, merges, partials:", put("partials", lambda partials: partials[:0])),
        "narrow partials": ("partials:", put("partials", lambda partials: partials[:, :-1].contiguous())),
        "flat partials": ("partials:", put("partials", lambda partials: partials.flatten())),
        "another merge": ("pieces, merges, partials:", put_at("merges", (0, 2), 2**31 - 1)),
        "more splits": ("pieces, merges, partials:", put_at("merges", (0, 3), 2**31 - 1)),
        "no window": ("window, chunk:", put("window", 0)),
        "no chunk": ("window, chunk:", put("chunk", -5)),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_what_would_lead_out_of_memory_is_refused(name: str) -> None:
    case = make_case(make_spec(), [(3, 20), (1, 1200)])
    plan = torch.ops.hf_cb.plan(case.step.cu_seqlens_q, case.step.seq_lens_k, *_heads(case), case.spec.head_size, None, None)
    call = {"q": case.q, "k": case.k, "v": case.v, "k_cache": case.kv.k, "v_cache": case.kv.v}
    call |= {"slots": case.step.slot_mapping, "table": case.step.block_table}
    call |= dict(zip(("pieces", "merges", "partials"), plan, strict=True))
    call |= {"sinks": None, "scale": 1.0, "window": None, "chunk": None, "softcap": None}
    torch.ops.hf_cb.attend(**call)
    start, change = bad_calls()[name]
    change(call)
    with pytest.raises(RuntimeError, match=f"^{start}"):
        torch.ops.hf_cb.attend(**call)


def _heads(case: Case) -> tuple[int, int]:
    return case.spec.num_kv_heads, case.spec.num_heads // case.spec.num_kv_heads
