"""A KV cache in another dtype than the model's: which backends can, and how far what they give may be from the truth.

There are no scales: a number is rounded to the dtype as it is, at most to its largest. In float8_e4m3fn (a sign, 4 bits of
exponent, 3 of fraction; Micikevicius et al., 2022) that is off by a sixteenth at most, or by 2**-10 for what is tiny.
"""

from __future__ import annotations

import dataclasses

import emulators
import pytest
import torch
from steps import Case, make_case, make_spec

from hf_cb.attention.backend import attention_backend_names, choose_attention_backend, load_attention_backend
from hf_cb.attention.reference import ReferenceBackend
from hf_cb.attention.step import LayerKV, LayerSpec, saturated
from hf_cb.errors import InvalidArgumentError

ORACLE = ReferenceBackend()
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS = [(1, 300), (7, 20), (1, 0), (40, 0), (1, 31)]


def stored(case: Case, dtype: torch.dtype) -> Case:
    """The same step over a cache in `dtype`."""
    kv = LayerKV(*(saturated(part, dtype) for part in case.kv))
    return dataclasses.replace(case, spec=dataclasses.replace(case.spec, kv_dtype=dtype), kv=kv)


@pytest.mark.parametrize(
    ("dtype", "relative", "smallest", "largest"), [(E4M3, 2**-4, 2**-10, 448.0), (E5M2, 2**-3, 2**-17, 57344.0)]
)
def test_how_far_a_stored_number_is_off(dtype: torch.dtype, relative: float, smallest: float, largest: float) -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).mul_(40).exp2_()
    x = torch.cat([x, -x, torch.zeros(1)])
    x = x[x.abs() <= largest]
    off = (saturated(x, dtype).float() - x).abs()
    assert bool((off <= (relative * x.abs()).clamp_min(smallest)).all())
    assert float((off / x.abs().clamp_min(1e-30)).max()) > relative / 2  # the bound is not idle
    beyond = torch.tensor([largest * 1.5, -1e30, torch.inf, torch.nan])
    assert saturated(beyond, dtype).float().tolist()[:3] == [largest, -largest, largest]
    assert bool(saturated(beyond, dtype).float()[3].isnan())


def test_what_fits_is_not_touched() -> None:
    x = torch.randn(10)
    assert saturated(x, torch.float32) is x
    assert torch.equal(saturated(x.bfloat16(), torch.float32), x.bfloat16().float())


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 3.0}, {"chunk": 8}, {"has_sinks": True}])
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2, torch.bfloat16, torch.float16])
def test_grouped_reads_what_is_stored(options: dict[str, object], kv_dtype: torch.dtype) -> None:
    """As the oracle over the same stored numbers, new ones of the step among them; the rest of the cache may hold NaN."""
    case = stored(make_case(make_spec(**options), ROWS), kv_dtype)
    backend = load_attention_backend("torch_grouped")
    torch.testing.assert_close(case.attend(backend), case.attend(ORACLE), rtol=2e-5, atol=2e-5)


def test_a_wider_cache_changes_nothing() -> None:
    case = make_case(make_spec(dtype=torch.bfloat16), ROWS)
    backend = load_attention_backend("torch_grouped")
    assert torch.equal(case.attend(backend), stored(case, torch.float32).attend(backend))


def bound(case: Case, spread: torch.Tensor) -> torch.Tensor:
    """[T, Hq]: how far attention over float8_e4m3fn keys and values may be from that over the true ones.

    Keys off by a sixteenth move a score by at most d = scale * sum |q| |k| / 16 for the largest such sum over the keys, so
    each weight by a factor in e**(-2d) .. e**(2d); and values are off by a sixteenth of the largest.
    """
    largest = float(case.v.abs().max().maximum(case.kv.v.nan_to_num().abs().max()))
    moved = torch.expm1(2 * spread)
    return largest * (2**-4 * (1 + moved) + moved)


def test_the_error_of_float8_is_bounded() -> None:
    case = make_case(make_spec(num_heads=4, num_kv_heads=2, scale=0.02), ROWS)
    keys = torch.cat([case.k.flatten(0, 1), case.kv.k.nan_to_num().flatten(0, 2)])
    largest = keys.abs().amax(0)  # of each dimension: no key is larger in any
    spread = case.spec.scale * (case.q.abs() @ largest) / 16  # [T, Hq]
    off = (stored(case, E4M3).attend(load_attention_backend("torch_grouped")) - case.attend(ORACLE)).abs().amax(-1)
    assert bool((off <= bound(case, spread)).all())
    assert float(off.max()) > 1e-3  # it is another answer


def spec_of(dtype: torch.dtype, kv_dtype: torch.dtype | None, **options: object) -> LayerSpec:
    return make_spec(dtype=dtype, kv_dtype=kv_dtype, **options)


def test_who_takes_it_on_a_cpu() -> None:
    chosen, reason = choose_attention_backend([spec_of(torch.float32, E4M3)])
    assert chosen.name == "torch_grouped"
    refusal = "keeps no keys and values of float32 in float8_e4m3fn"
    assert reason.startswith(f"native_cpu: {refusal}; ")
    with pytest.raises(InvalidArgumentError, match=f"^attention_backend: .*native_cpu: {refusal}"):
        choose_attention_backend([spec_of(torch.float32, E4M3)], "native_cpu")


def test_every_backend_refuses_or_is_right() -> None:
    for name in attention_backend_names():
        with emulators.installed(name, (torch.float32, *emulators.HALF)):
            for kv_dtype in (E4M3, torch.bfloat16):
                case, backend = stored(make_case(make_spec(), ROWS, 256), kv_dtype), load_attention_backend(name)
                try:
                    choose_attention_backend([case.spec], name)
                except InvalidArgumentError:
                    continue
                exact = name != "flash_attn_3"  # its queries are in float8 as well
                tolerance = 2e-5 if exact else 0.2
                torch.testing.assert_close(case.attend(backend), case.attend(ORACLE), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("facts", "takes"),
    [
        ({"kv_dtype": E4M3}, True),
        ({"kv_dtype": None}, True),
        ({"kv_dtype": torch.bfloat16}, True),
        ({"kv_dtype": E5M2}, False),
        ({"kv_dtype": torch.float16}, False),
        ({"kv_dtype": E4M3, "head_size": 24}, False),  # 16 divides it not
        ({"kv_dtype": E4M3, "window": 5, "softcap": 3.0}, True),
    ],
)
def test_flash_attention_3(facts: dict[str, object], takes: bool) -> None:
    """float8 in the kernel itself: queries too, without scales, and bfloat16 out."""
    with emulators.installed("flash_attn_3") as library:
        spec = make_spec(**{"dtype": torch.bfloat16, **facts})
        if not takes:
            with pytest.raises(InvalidArgumentError, match="keeps no keys"):
                choose_attention_backend([spec], "flash_attn_3")
            return
        backend, _ = choose_attention_backend([spec], "flash_attn_3")
        case = stored(make_case(dataclasses.replace(spec, kv_dtype=None), ROWS, 16), spec.stored_dtype)
        got = case.attend(backend)
        assert got.dtype == torch.bfloat16
        assert library.calls == ["flash_attn_3"]
        rounded = dataclasses.replace(case, q=saturated(case.q, spec.stored_dtype).bfloat16())
        torch.testing.assert_close(got.float(), rounded.attend(ORACLE).float(), rtol=2e-2, atol=2e-2)


def test_the_emulator_of_flash_attention_3_in_float8() -> None:
    """One dtype for all three; scales float32 [N, Hkv]; they count."""
    call = {
        "q": torch.randn(2, 4, 16).to(E4M3),
        "k_cache": torch.randn(2, 4, 2, 16).to(E4M3),
        "v_cache": torch.randn(2, 4, 2, 16).to(E4M3),
        "cache_seqlens": torch.tensor([3, 2], dtype=torch.int32),
        "page_table": torch.tensor([[1], [0]], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32),
        "max_seqlen_q": 1,
        "causal": True,
    }
    attend = emulators.Library().fa3_with_kvcache
    plain = attend(**call)
    assert plain.dtype == torch.bfloat16
    doubled = attend(**call, v_descale=torch.full((2, 2), 2.0))
    torch.testing.assert_close(doubled.float(), 2 * plain.float(), rtol=1e-2, atol=1e-2)
    for message, changes in {
        "one for all": {"q": torch.randn(2, 4, 16).bfloat16()},
        "descale": {"k_descale": torch.ones(2)},
        "multiple of 16": {n: call[n][..., :8].contiguous() for n in ("q", "k_cache", "v_cache")},
    }.items():
        with pytest.raises(emulators.RefusedError, match=message):
            attend(**call | changes)
