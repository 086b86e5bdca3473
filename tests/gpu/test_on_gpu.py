"""On a real GPU: the kernels against the oracle, and the engine against plain `generate()`. Without one, nothing here runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import inside
import models
import pytest
import torch

import hf_cb
from hf_cb.attention.backend import attention_backend_names, load_attention_backend
from hf_cb.attention.reference import ReferenceBackend
from hf_cb.attention.step import LayerCall, LayerKV, LayerSpec
from hf_cb.core.output import RowMemory, ScheduledRow, SchedulerOutput
from hf_cb.core.swap_cost import SwapCost
from hf_cb.runtime.input_batch import build_input_batch
from hf_cb.runtime.streams import streams_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use"),
    pytest.mark.timeout(300),
]

CUDA = torch.device("cuda")
SPEC = LayerSpec(8, 2, 64, 64, torch.bfloat16, CUDA, 0.125)
SPECS = {
    "plain": SPEC,
    "window": dataclasses.replace(SPEC, window=100),
    "softcap": dataclasses.replace(SPEC, softcap=20.0),
    "one key head each": dataclasses.replace(SPEC, num_kv_heads=8),
    "head size 128": dataclasses.replace(SPEC, head_size=128, value_head_size=128),
    "float32": dataclasses.replace(SPEC, dtype=torch.float32),
    "sinks": dataclasses.replace(SPEC, has_sinks=True),
}
ROWS = ((1, 700), (300, 0), (1, 3), (77, 130), (1, 255), (1, 256), (1, 0))  # (tokens of the step, tokens before)


@pytest.mark.parametrize("name", attention_backend_names())
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("rows", [ROWS, tuple(row for row in ROWS if row[0] == 1)], ids=["mixed", "decode"])
def test_kernel(name: str, spec: LayerSpec, rows: tuple[tuple[int, int], ...]) -> None:
    backend = load_attention_backend(name)
    if (reason := backend.why_not(spec)) is not None:
        pytest.skip(reason)
    generator, size = torch.Generator().manual_seed(0), max(16, backend.block_multiple)
    counts = [-(-(new + before) // size) for new, before in rows]
    deck = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    tables = [tuple(deck.pop() for _ in range(count)) for count in counts]
    scheduled = tuple(ScheduledRow(i, before, (0,) * new, RowMemory(tables[i]), 1) for i, (new, before) in enumerate(rows))
    step = build_input_batch(SchedulerOutput(scheduled, sum(n for n, _ in rows)), size, streams_of(CUDA)).steps[0]

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(CUDA, spec.dtype)

    kv = LayerKV(*(torch.full((sum(counts) + 3, size, spec.num_kv_heads, spec.head_size), torch.nan) for _ in "kv"))
    kv = LayerKV(*(part.to(CUDA, spec.dtype) for part in kv))
    for (_, before), table in zip(rows, tables, strict=True):
        slots = [table[p // size] * size + p % size for p in range(before)]
        for part in kv:
            part.flatten(0, 1)[slots] = randn(before, spec.num_kv_heads, spec.head_size)
    total = sum(n for n, _ in rows)
    q, k, v = (randn(total, heads, spec.head_size) for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads))
    sinks = randn(spec.num_heads) if spec.has_sinks else None

    def attend(by: Any) -> torch.Tensor:
        own = LayerKV(kv.k.clone(), kv.v.clone())
        return by.attend(LayerCall(q, k, v, own, spec, step, by.plan(step, spec), sinks)).float()  # type: ignore[no-any-return]

    tolerance = 2e-5 if spec.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(attend(backend), attend(ReferenceBackend()), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "qwen2_moe", "gpt2"])
@pytest.mark.parametrize("options", [{}, {"max_batch_tokens": 16}], ids=["whole", "token budget 16"])
def test_same_tokens_in_float32(name: str, options: dict[str, Any]) -> None:
    model = models.tiny(name).to(CUDA)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, models.VOCAB, (n,), generator=generator) for n in (3, 30, 11, 70)]
    want = [type(model).generate(model, p[None].to(CUDA), max_new_tokens=16)[0, len(p) :].tolist() for p in prompts]
    beams = type(model).generate(model, prompts[1][None].to(CUDA), max_new_tokens=8, num_beams=3)
    with hf_cb.continuous_batching(model, **options) as engine:
        assert [list(result.tokens) for result in engine.generate_batch(prompts, max_new_tokens=16)] == want
        assert torch.equal(model.generate(prompts[1][None].to(CUDA), max_new_tokens=8, num_beams=3), beams)
        assert engine.stats().native_calls == {}


def test_no_launch_waits_for_the_gpu() -> None:
    """torch raises where a launch would wait; the tokens are those of an engine that waits for each step."""
    model = models.tiny("llama", head_dim=64).to(CUDA, torch.bfloat16)
    prompts = [torch.arange(3, 3 + n) for n in (5, 40, 17)]
    calls: list[dict[str, Any]] = [
        {},
        {"do_sample": True, "seed": 1},
        {"do_sample": True, "top_p": 0.9, "top_k": 20, "seed": 2},
    ]

    def answers(engine: hf_cb.Engine) -> list[tuple[int, ...]]:
        handles = [engine.submit(p, max_new_tokens=30, **c) for p, c in zip(prompts, calls, strict=True)]
        return [handle.result().tokens for handle in handles]

    with hf_cb.continuous_batching(model, overlap=False) as engine:
        want = answers(engine)
    with hf_cb.continuous_batching(model, overlap=True) as engine:
        assert answers(engine) == want  # kernels are compiled and memory is taken
        runner = inside.runner(engine)
        launch = runner.launch

        def strictly(*args: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        runner.launch = strictly  # type: ignore[method-assign]
        assert answers(engine) == want


def test_swaps_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapCost, "is_cheaper", lambda *_: True)
    model = models.tiny("llama").to(CUDA)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, models.VOCAB, (60,), generator=generator) for _ in range(8)]
    want = [type(model).generate(model, p[None].to(CUDA), max_new_tokens=60)[0, 60:].tolist() for p in prompts]
    with hf_cb.continuous_batching(model, block_size=16, num_blocks=20, swap_space="64MiB") as engine:
        assert [list(result.tokens) for result in engine.generate_batch(prompts, max_new_tokens=60)] == want
        assert engine.stats().swaps > 0


PLAN = ((200, 120), (3, 40), (30, 200), (11, 25), (70, 60), (1, 90))  # tokens of the prompt, new ones: across sizes of graphs


def logprobs(engine: hf_cb.Engine) -> list[list[tuple[int, float]]]:
    """Tokens and their log-probabilities, of each request of PLAN."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, models.VOCAB, (n,), generator=generator) for n, _ in PLAN]
    handles = [engine.submit(p, max_new_tokens=new, logprobs=0) for p, (_, new) in zip(prompts, PLAN, strict=True)]
    results = [handle.result() for handle in handles]
    return [[(t, note.logprob) for t, note in zip(r.tokens, r.logprobs or (), strict=True)] for r in results]


def same_as_far_as_half_precision_goes(got: list[tuple[int, float]], want: list[tuple[int, float]]) -> bool:
    """Until the tokens differ, which they may where two are about as probable, so are the probabilities."""
    for (token, logprob), (other, other_logprob) in zip(got, want, strict=True):
        if abs(logprob - other_logprob) > 0.2:
            return False
        if token != other:
            break
    return True


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
def test_graphs_on_and_off(name: str) -> None:
    """In bfloat16, which the kernels that can be captured take."""
    model = models.tiny(name, head_dim=16).to(CUDA, torch.bfloat16)
    with hf_cb.continuous_batching(model, graph_memory=0) as engine:
        want = logprobs(engine)
        assert engine.stats().graphs == 0
    with hf_cb.continuous_batching(model) as engine:
        for _ in range(3):
            assert all(map(same_as_far_as_half_precision_goes, logprobs(engine), want))
        with engine.pause(release_kv=True):
            assert engine.stats().graphs == 0
        for _ in range(3):
            assert all(map(same_as_far_as_half_precision_goes, logprobs(engine), want))
        stats = engine.stats()
    torch.rand(1, device=CUDA)  # a capture leaves torch's generator as it was
    if "flash" not in stats.attention_backend:
        pytest.skip(f"nothing was captured: {stats.graph_reason}")
    assert stats.graphs > 3, stats.graph_reason
