"""GroupedTorch against the oracle: every option, any device's operations, on a CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from steps import Case, cases, make_case, make_spec

from hf_cb.attention.grouped import _TILE, GroupedTorch
from hf_cb.attention.reference import ReferenceBackend

BACKEND, ORACLE = GroupedTorch(), ReferenceBackend()


@settings(max_examples=150, deadline=None)
@given(cases())
def test_float32(case: Case) -> None:
    torch.testing.assert_close(case.attend(BACKEND), case.attend(ORACLE), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3), (torch.float64, 1e-5)])
def test_other_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    case = make_case(make_spec(dtype=dtype, has_sinks=True), [(1, 30), (70, 20), (1, 3)])
    torch.testing.assert_close(case.attend(BACKEND), case.attend(ORACLE), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"window": 40}, {"chunk": 100}])
def test_a_row_of_several_tiles(options: dict[str, int]) -> None:
    case = make_case(make_spec(**options), [(2 * _TILE + 5, 30), (1, 500), (1, 20)], block_size=16)
    torch.testing.assert_close(case.attend(BACKEND), case.attend(ORACLE), rtol=2e-5, atol=2e-5)


def test_what_is_gathered_is_bounded() -> None:
    """Rows of like length together; of a window, what it sees."""
    case = make_case(make_spec(), [(1, context) for context in range(0, 600, 7)], block_size=16)
    assert sum(part.slots.numel() for part in BACKEND.plan(case.step, case.spec)) <= 2 * sum(case.step.key_lens) + 16 * 86
    case = make_case(make_spec(window=20), [(1, 900), (3, 900)], block_size=16)
    assert [part.slots.shape[1] for part in BACKEND.plan(case.step, case.spec)] == [20, 22]


def test_the_meta_device() -> None:
    assert BACKEND.why_not(make_spec(device=torch.device("meta"))) is not None
    assert BACKEND.why_not(make_spec()) is None
