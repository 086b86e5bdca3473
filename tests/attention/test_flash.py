"""The backends for flash-attn and torch's varlen attention, through strict emulators of those libraries, against the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import emulators
import pytest
import torch
from emulators import Library, RefusedError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from steps import Case, make_case, make_spec

from hf_cb.attention import flash, varlen
from hf_cb.attention.backend import load_attention_backend
from hf_cb.attention.reference import ReferenceBackend

NAMES = ("flash_attn_2", "flash_attn_3", "flash_attn_4", "torch_varlen")
ORACLE = ReferenceBackend()
EVERYTHING = (torch.float32, *emulators.HALF)


@pytest.fixture(params=NAMES)
def library(request: pytest.FixtureRequest) -> Iterator[tuple[str, Library]]:
    with emulators.installed(request.param, EVERYTHING) as made:
        yield request.param, made


@st.composite
def cases(draw: st.DrawFn, name: str) -> Case:
    num_kv_heads, head_size = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([8, 16, 64]))
    spec = make_spec(
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 4])),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        scale=draw(st.sampled_from([head_size**-0.5, 0.3])),
        window=draw(st.none() | st.integers(1, 60)),
        softcap=None if name == "torch_varlen" else draw(st.none() | st.just(3.0)),
    )
    row = st.tuples(st.just(1), st.integers(0, 70)) | st.tuples(st.integers(2, 40), st.integers(0, 50))
    only_decode = st.lists(st.tuples(st.just(1), st.integers(0, 70)), min_size=1, max_size=4)
    block_size = 256 if name == "flash_attn_2" else draw(st.integers(1, 20))
    return make_case(spec, draw(only_decode | st.lists(row, min_size=1, max_size=4)), block_size, draw(st.integers(0, 99)))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_like_the_oracle(library: tuple[str, Library], data: st.DataObject) -> None:
    """Mixed steps, decode alone, shuffled blocks, NaN wherever nobody has written."""
    name, made = library
    case, backend = data.draw(cases(name)), load_attention_backend(name)
    assert backend.why_not(case.spec) is None
    made.calls.clear()
    torch.testing.assert_close(case.attend(backend), case.attend(ORACLE), rtol=2e-5, atol=2e-5)
    decodes = name == "flash_attn_2" and set(case.step.query_lens) == {1}
    assert made.calls == ["flash_attn_2 decode" if decodes else name]


def test_half_precision(library: tuple[str, Library]) -> None:
    backend = load_attention_backend(library[0])
    for dtype in emulators.HALF:
        case = make_case(make_spec(dtype=dtype), [(1, 30), (7, 20)], 256)
        torch.testing.assert_close(case.attend(backend).float(), case.attend(ORACLE).float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"dtype": torch.float32}, "takes float16 or bfloat16, not float32"),
        ({"head_size": 12}, "multiples of 8"),
        ({"head_size": 264}, "at most 256"),
        ({"value_head_size": 8}, "one head size"),
        ({"has_sinks": True}, "no sinks"),
        ({"chunk": 8}, "no chunks"),
        ({"num_heads": 3}, "a whole number of query heads"),
        ({"device": torch.device("meta")}, "not on meta"),
    ],
)
def test_refusals(name: str, facts: dict[str, Any], reason: str) -> None:
    """Before any call, in words; the emulator would raise for the same."""
    with emulators.installed(name):
        spec = make_spec(**{"dtype": torch.bfloat16, **facts})
        assert reason in str(load_attention_backend(name).why_not(spec))
        assert load_attention_backend(name).why_not(make_spec(dtype=torch.bfloat16)) is None


def test_where_they_run() -> None:
    spec = make_spec(dtype=torch.bfloat16)
    everywhere = [(8, 0), (9, 0), (10, 0), (12, 0)]
    runs = {"flash_attn_2": everywhere, "flash_attn_3": [(9, 0)], "flash_attn_4": [(9, 0), (10, 0)], "torch_varlen": everywhere}
    for name in NAMES:
        for found in [(7, 5), *everywhere]:
            with emulators.installed(name), pytest.MonkeyPatch.context() as patch:
                for module in (flash, varlen):
                    patch.setattr(module, "capability", lambda _, found=found: found)
                reason = load_attention_backend(name).why_not(spec)
            assert (reason is None) == (found in runs[name])
            assert reason is None or "compute capability" in reason


@pytest.mark.parametrize("softcap", [3.0])
def test_torch_knows_no_softcap(softcap: float) -> None:
    with emulators.installed("torch_varlen"):
        assert load_attention_backend("torch_varlen").why_not(make_spec(dtype=torch.bfloat16, softcap=softcap)) is not None


# -- the emulators themselves ------------------------------------------------------------------------------------------------


def _call(**changes: Any) -> dict[str, Any]:
    """A good call of flash-attn 2: sequences of 1 and 3 queries over 5 and 3 keys."""
    call: dict[str, Any] = {
        "q": torch.randn(4, 4, 8).bfloat16(),
        "k": torch.randn(3, 256, 2, 8).bfloat16(),
        "v": torch.randn(3, 256, 2, 8).bfloat16(),
        "cu_seqlens_q": torch.tensor([0, 1, 4], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 5, 8], dtype=torch.int32),
        "max_seqlen_q": 3,
        "max_seqlen_k": 5,
        "causal": True,
        "block_table": torch.tensor([[1], [2]], dtype=torch.int32),
    }
    return call | changes


TRAPS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("dtype", {"q": torch.randn(4, 4, 8)}),
    "small blocks": ("divisible by 256", {name: torch.randn(3, 16, 2, 8).bfloat16() for name in "kv"}),
    "int64 lengths": ("int32", {"cu_seqlens_q": torch.tensor([0, 1, 4])}),
    "int64 table": ("int32", {"block_table": torch.tensor([[1], [2]])}),
    "a table that is a view": ("contiguous", {"block_table": torch.zeros(2, 4, dtype=torch.int32)[:, ::2]}),
    "an entry that is no block": ("every entry", {"block_table": torch.tensor([[1, -1], [2, 0]], dtype=torch.int32)}),
    "an unused entry beyond": ("every entry", {"block_table": torch.tensor([[1, 3], [2, 0]], dtype=torch.int32)}),
    "a stale maximum": ("max_seqlen_k", {"max_seqlen_k": 4}),
    "a tensor for a maximum": ("Python int", {"max_seqlen_q": torch.tensor(3)}),
    "one query at the most": ("max_seqlen_q", {"max_seqlen_q": 1}),
    "an empty sequence": ("no sequence without", {"cu_seqlens_q": torch.tensor([0, 0, 4], dtype=torch.int32)}),
    "tokens left over": ("there are 4 tokens", {"cu_seqlens_q": torch.tensor([0, 1, 3], dtype=torch.int32)}),
    "heads that don't divide": ("divide", {"q": torch.randn(4, 3, 8).bfloat16()}),
    "head size": (
        "head size",
        {n: torch.randn(*s, 12).bfloat16() for n, s in [("q", (4, 4)), ("k", (3, 256, 2)), ("v", (3, 256, 2))]},
    ),
    "strides": ("last dimension", {"q": torch.randn(8, 4, 4).bfloat16().permute(1, 2, 0)}),
}


@pytest.mark.parametrize(("message", "changes"), TRAPS.values(), ids=TRAPS)
def test_the_emulator_refuses(message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match=message):
        Library().fa2_varlen(**_call(**changes))


def _decode_call(**changes: Any) -> dict[str, Any]:
    """A good call for single queries, of rows with 5 and 257 keys."""
    generator = torch.Generator().manual_seed(0)
    cache = [torch.randn(4, 256, 2, 8, generator=generator).bfloat16() for _ in "kv"]
    call: dict[str, Any] = {
        "q": torch.randn(2, 1, 4, 8, generator=generator).bfloat16(),
        "k_cache": cache[0],
        "v_cache": cache[1],
        "cache_seqlens": torch.tensor([5, 257], dtype=torch.int32),
        "block_table": torch.tensor([[1, 0], [2, 3]], dtype=torch.int32),
        "causal": True,
    }
    return call | changes


_NEW = torch.ones(2, 1, 2, 8).bfloat16()
DECODE_TRAPS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("dtype", {"q": torch.randn(2, 1, 4, 8)}),
    "packed queries": (r"\[N, Sq, H, D\]", {"q": torch.randn(2, 4, 8).bfloat16()}),
    "small blocks": ("divisible by 256", {name: torch.randn(4, 16, 2, 8).bfloat16() for name in ("k_cache", "v_cache")}),
    "int64 lengths": ("int32", {"cache_seqlens": torch.tensor([5, 257])}),
    "one length for all": ("a tensor of them", {"cache_seqlens": 5}),
    "no lengths": ("cache_seqlens", {"cache_seqlens": None}),
    "lengths of other rows": ("one for each row", {"cache_seqlens": torch.tensor([5], dtype=torch.int32)}),
    "int64 table": ("int32", {"block_table": torch.tensor([[1, 0], [2, 3]])}),
    "an entry that is no block": ("every entry", {"block_table": torch.tensor([[1, 9], [2, 3]], dtype=torch.int32)}),
    "a table that is too short": ("too short", {"block_table": torch.tensor([[1], [2]], dtype=torch.int32)}),
    "rows picked from the cache": ("cache_batch_idx", {"cache_batch_idx": torch.tensor([1, 0], dtype=torch.int32)}),
    "padding to the left": ("leftpad", {"cache_leftpad": torch.tensor([1, 0], dtype=torch.int32)}),
    "keys without values": ("together", {"k": _NEW}),
    "new keys of another dtype": ("q's dtype", {"k": _NEW.float(), "v": _NEW.float()}),
    "new keys without room": (
        "too short",
        {"k": _NEW, "v": _NEW, "cache_seqlens": torch.tensor([5, 512], dtype=torch.int32)},
    ),
}


@pytest.mark.parametrize(("message", "changes"), DECODE_TRAPS.values(), ids=DECODE_TRAPS)
def test_the_decode_emulator_refuses(message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match=message):
        Library().fa2_with_kvcache(**_decode_call(**changes))


def test_the_decode_emulator_appends_at_the_lengths() -> None:
    """With new keys the lengths are those before; in place, and seen by the query."""
    call, lens = _decode_call(), torch.tensor([4, 256], dtype=torch.int32)
    k, v = call["k_cache"].clone(), call["v_cache"].clone()
    for cache in (call["k_cache"], call["v_cache"]):
        cache[1, 4], cache[3, 0] = 1, 1
    got = Library().fa2_with_kvcache(**call | {"k_cache": k, "v_cache": v, "k": _NEW, "v": _NEW, "cache_seqlens": lens})
    assert torch.equal(got, Library().fa2_with_kvcache(**call))
    assert torch.equal(k, call["k_cache"])
    assert torch.equal(v, call["v_cache"])


def test_the_decode_emulator_is_the_varlen_one_for_single_queries() -> None:
    call = _decode_call(window_size=(40, 0), softcap=2.0)
    packed = {"q": call["q"][:, 0], "k": call["k_cache"], "v": call["v_cache"], "max_seqlen_q": 1, "max_seqlen_k": 257}
    cu_seqlens = {"cu_seqlens_q": [0, 1, 2], "cu_seqlens_k": [0, 5, 262]}
    packed |= {name: torch.tensor(values, dtype=torch.int32) for name, values in cu_seqlens.items()}
    packed |= {name: call[name] for name in ("block_table", "causal", "window_size", "softcap")}
    assert torch.equal(Library().fa2_with_kvcache(**call)[:, 0], Library().fa2_varlen(**packed))


def test_the_emulator_takes_a_good_call_and_is_aligned_bottom_right() -> None:
    call = _call()
    out = Library().fa2_varlen(**call)
    q, k, v = call["q"].float(), call["k"][1, :5].float(), call["v"][1, :5].float()
    probs = torch.einsum("hd,mhd->hm", q[0], k.repeat_interleave(2, 1)).mul(8**-0.5).softmax(-1)
    expected = torch.einsum("hm,mhd->hd", probs, v.repeat_interleave(2, 1))  # the only query of the first sees all five
    torch.testing.assert_close(out[0].float(), expected, atol=2e-2, rtol=2e-2)
    assert torch.equal(out[1], call["v"][2, :1].repeat_interleave(2, 1)[0])  # the second's first sees one


def test_other_traps() -> None:
    good = _call()
    table, lens = good["block_table"], torch.tensor([5, 3], dtype=torch.int32)
    four = {"q": good["q"], "k": good["k"], "v": good["v"], "cu_seqlens_q": good["cu_seqlens_q"], "causal": True}
    four |= {"max_seqlen_q": 3, "max_seqlen_k": 5, "page_table": table}
    with pytest.raises(RefusedError, match="seqused_k"):
        Library().fa4_varlen(**four)
    with pytest.raises(RefusedError, match="refuses cu_seqlens_k"):
        Library().fa4_varlen(**four, seqused_k=lens, cu_seqlens_k=good["cu_seqlens_k"])
    with pytest.raises(RefusedError, match="None, not -1"):
        Library().fa4_varlen(**four, seqused_k=lens, window_size=(-1, -1))
    with pytest.raises(RefusedError, match="by keyword"):
        Library().fa4_varlen(good["q"], good["k"], good["v"], good["cu_seqlens_q"])
    out, _ = Library().fa4_varlen(**four, seqused_k=lens)
    assert torch.equal(out, Library().fa2_varlen(**good))
    three = {"q": good["q"], "k_cache": good["k"], "v_cache": good["v"], "page_table": table, "causal": True}
    with pytest.raises(RefusedError, match="cu_seqlens_q"):
        Library().fa3_with_kvcache(**three, cache_seqlens=lens)
    assert torch.equal(
        out, Library().fa3_with_kvcache(**three, cache_seqlens=lens, cu_seqlens_q=good["cu_seqlens_q"], max_seqlen_q=3)
    )
    with pytest.raises(RefusedError, match="reads no blocks"):
        Library().varlen_attn(good["q"], good["k"], good["v"], lens, None, 3, 5, block_table=table)
