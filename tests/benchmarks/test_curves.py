from __future__ import annotations

import json

import pytest
import small
import torch
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from benchmarks import curves, memory, peers, roofline, shapes
from benchmarks.subject import Subject
from benchmarks.workload import Item, Workload

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    model = small.llama(tie_word_embeddings=True)
    peers.ignore_end_of_sequence(model)
    return model


@pytest.mark.parametrize(("kind", "points"), [("concurrency", "1,2"), ("arrivals", "20,40"), ("normalised", "80,160")])
def test_a_curve_is_measured_and_drawn(kind, points, model, monkeypatch, tmp_path):
    monkeypatch.setattr(curves.subject, "load", lambda *_: Subject(model, "nowhere", [i % 40 for i in range(2000)]))
    curves.main([kind, "--points", points, "--scale", "0.02", "--out", str(tmp_path), "--peers", "locked,hf_cb"])
    result = json.loads((tmp_path / f"{kind}.json").read_text())
    assert [point["x"] for point in result["points"]] == [float(p) for p in points.split(",")]
    for point in result["points"]:
        assert set(point["peers"]) == {"locked", "hf_cb"}
        assert all(figures["output_tokens_per_second"] > 0 for figures in point["peers"].values())
    small.assert_redrawn(tmp_path / f"{kind}.png", lambda: curves.main(["draw", str(tmp_path / f"{kind}.json")]))


def test_each_point_has_its_clients_and_enough_requests():
    def make(requests: int, rate: float | None) -> Workload:
        return Workload.make(range(2000), requests, rate=rate)

    for clients, requests in ((1, 8), (4, 16), (64, 64)):
        workload, concurrency = curves._at_concurrency(clients, make)
        assert (len(workload.items), concurrency) == (requests, clients)
    workload, concurrency = curves._at_rate(2.0, make)
    assert concurrency is None
    assert workload.items[-1].arrival > 0


def test_the_work_of_a_step_is_counted_from_the_modules(model):
    work = roofline.Work.of(model)
    layer = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48  # q and o, k and v, gate and up and down
    assert (work.layer_weights, work.output_weights) == (2 * layer, 40 * 32)
    assert work.kv_elements == 2 * 2 * 2 * 8  # keys and values, layers, heads, head size
    assert work.decode_bytes(10) == 4 * (2 * layer + 40 * 32 + 10 * 64)
    assert work.prefill_flops(6) == 2 * 2 * layer * 6 + 2 * 40 * 32 + 2 * 2 * 32 * 36


def test_the_shape_has_the_published_number_of_parameters():
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**shapes.SHAPES["qwen2.5-0.5b"]))
    assert sum(p.numel() for p in model.parameters()) == 494_032_768
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_plain_generates_peak_is_at_the_longest_prompt_or_the_most_tokens():
    sizes = ((5, 9), (7, 1), (2, 3))
    items = tuple(Item(i, (0,) * prompt, output) for i, (prompt, output) in enumerate(sizes))
    assert memory.largest(Workload(items)).items == items[:2]
    assert memory.largest(Workload(items[:1])).items == items[:1]


def test_memory_is_stated_against_plain_generate():
    text = memory.render(
        {"locked": {"ready_bytes": 1 << 20, "peak_bytes": 2 << 20}, "hf_cb": {"ready_bytes": 1 << 20, "peak_bytes": 3 << 20}}
    )
    assert [line.split()[-1] for line in text.splitlines()] == ["plain", "1.00", "1.50"]
