"""The whole engine with CUDA graphs, emulated strictly on the CPU: every token is plain `generate()`'s."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import emulators
import graph_emulator
import inside
import models
import pytest
import torch
import truth
from graph_emulator import Device
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

import hf_cb
from hf_cb import Engine
from hf_cb.runtime import graphs

pytestmark = pytest.mark.timeout(60)

CALLS = truth.Calls([(3, 14), (17, 9), (9, 20), (26, 6), (5, 16)])  # rows leave one after the other, through several sizes
KERNELS = {"flash_attn_2": 256, "flash_attn_3": 4, "flash_attn_4": 4}


@pytest.fixture(autouse=True)
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_FEWEST_KEYS", 8)  # so that rows of a few dozen tokens pass through several sizes


@pytest.fixture
def device() -> Iterator[Device]:
    with emulators.installed("flash_attn_3", (torch.float32,)), graph_emulator.emulated() as device:
        yield device


def options(**more: Any) -> dict[str, Any]:
    own = {"attention_backend": "flash_attn_3", "block_size": 4, "num_blocks": 64, "pack_memory": 0}
    return {**own, "overlap": True, **more}  # as on a GPU


@pytest.fixture
def model() -> PreTrainedModel:
    return models.tiny("llama", head_dim=16)


@pytest.fixture
def engine(device: Device, model: PreTrainedModel) -> Iterator[Engine]:
    with hf_cb.continuous_batching(model, **options()) as engine:
        yield engine


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3_text"])
def test_same_tokens_through_each_kernel(kernel: str, name: str) -> None:
    model = models.tiny(name, head_dim=16)
    want = CALLS.plain(model)
    with emulators.installed(kernel, (torch.float32,)), graph_emulator.emulated() as device:
        own = options(attention_backend=kernel, block_size=KERNELS[kernel], overlap=name != "llama")
        with hf_cb.continuous_batching(model, **own) as engine:
            CALLS.assert_right(engine, model)
            assert CALLS.one_by_one(model.generate) == want
            stats = engine.stats()
        assert stats.native_calls == {}
        assert stats.graphs > 2, stats.graph_reason
        assert device.events.count("replay") > 20


MORE = {
    "preemption": {"num_blocks": 17},
    "swapping": {"num_blocks": 17, "swap_space": "1MiB"},
    "chunks": {"max_batch_tokens": 8},
}


@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
def test_preemption_and_chunks(device: Device, model: PreTrainedModel, more: dict[str, Any]) -> None:
    with hf_cb.continuous_batching(model, **options(**more)) as engine:
        CALLS.assert_right(engine, model, times=2)
        stats = engine.stats()
    assert stats.graphs > 0, stats.graph_reason
    assert stats.preemptions > 0 or "max_batch_tokens" in more
    assert stats.swaps > 0 or "swap_space" not in more


def test_prefixes(engine: Engine, model: PreTrainedModel) -> None:
    want = [truth.plain(model, *call) for call in CALLS.pairs]
    for _ in range(3):
        assert truth.results([engine.submit(p, max_new_tokens=n) for p, n in CALLS.pairs]) == want
    assert engine.stats().graphs > 0
    assert engine.stats().prefix_hits > 0


def test_windows_in_groups_of_layers(device: Device) -> None:
    """Blocks that a group has given back are the block of zeros in its table, and the others' are not."""
    model = models.tiny(
        "gemma3_text", head_dim=16, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2
    )
    with hf_cb.continuous_batching(model, **options()) as engine:
        assert len(inside.core(engine).cache.layout.groups) > 1
        CALLS.assert_right(engine, model, times=2)
        assert engine.stats().graphs > 2
        cache = inside.core(engine).cache
        for part in (part for pair in cache.tensors for part in pair):
            assert not part[cache.num_blocks].any(), "rows that only fill up write elsewhere"
            assert part[cache.scratch_block, 0].any()
            assert not part[cache.scratch_block, 1:].any()


@pytest.mark.parametrize("more", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2, "top_k": 12}])
def test_beams_and_samples(device: Device, model: PreTrainedModel, more: dict[str, Any]) -> None:
    """Beams keep logits of earlier steps: those are not the graph's."""

    def ask(generate: Any) -> list[list[int]]:
        torch.manual_seed(5)
        return [generate(p, max_new_tokens=n, **more).tolist() for p, n in CALLS.pairs]

    want = CALLS.plain(model, num_beams=3)
    with hf_cb.continuous_batching(model, **options()) as engine:
        if "num_beams" in more:
            assert CALLS.at_once(engine, model, **more) == want
        with_graphs = ask(model.generate)
        assert engine.stats().graphs > 1
    with hf_cb.continuous_batching(model, **options(graph_memory=0)) as engine:
        assert ask(model.generate) == with_graphs
        assert (engine.stats().graphs, engine.stats().graph_reason) == (0, "graph_memory is 0")


def test_memory_given_back_and_taken_again(engine: Engine, model: PreTrainedModel, device: Device) -> None:
    CALLS.assert_right(engine, model)
    free, graphs_before = device.free, engine.stats().graphs
    assert graphs_before > 0
    with engine.pause(release_kv=True):
        assert engine.stats().graphs == 0
        assert device.free > free
    CALLS.assert_right(engine, model, times=2)
    assert engine.stats().graphs >= graphs_before


@torch.no_grad()
@pytest.mark.parametrize("how", ["in place", "through .data", "another storage"])
def test_weights_that_change(engine: Engine, model: PreTrainedModel, device: Device, how: str) -> None:
    """Graphs read new numbers where the old ones were; new addresses need new graphs."""
    CALLS.assert_right(engine, model, times=3)  # until every size has come often enough
    captures = device.events.count("capture")
    with engine.pause():
        for parameter in model.parameters():
            if how == "in place":
                parameter.mul_(1.1)
            elif how == "through .data":
                parameter.data.mul_(1.1)
            else:
                parameter.data = parameter.data * 1.1
    CALLS.assert_right(engine, model)
    again = device.events.count("capture") - captures
    assert (again > 0) == (how == "another storage")


@pytest.mark.filterwarnings("ignore:Already unmerged:UserWarning")
def test_adapters_merged_meanwhile(device: Device) -> None:
    """Whether they are, PEFT's layers ask in Python: what was captured before would add them twice."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        model = get_peft_model(models.tiny("llama", head_dim=16), config).eval()
    prompt = CALLS.pairs[3][0]
    want = truth.plain(model.get_base_model(), prompt, 40)  # merged or not
    with hf_cb.continuous_batching(model, **options()) as engine:
        handle = engine.submit(prompt, max_new_tokens=40)
        tokens = list(itertools.islice(handle, 12))
        with engine.pause():
            assert engine.stats().graphs > 0
            model.merge_adapter()
        assert list(handle.result().tokens) == want
        assert tokens == want[:12]
        assert engine.stats().graphs > 0


def test_a_capture_that_fails(engine: Engine, model: PreTrainedModel, device: Device, caplog: pytest.LogCaptureFixture) -> None:
    device.broken = True
    CALLS.assert_right(engine, model)
    assert engine.stats().graphs == 0
    assert "operation failed due to a previous error" in engine.stats().graph_reason
    assert device.events.count("capture") == 1, "it is the model: no other size is tried"
    assert sum("can't be captured" in record.message for record in caplog.records) == 1


def test_a_later_capture_that_fails(
    engine: Engine, model: PreTrainedModel, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    """Its sizes run without for good; the graphs that there are stay in use."""
    want = CALLS.plain(model)
    model.generate(CALLS.pairs[0][0], max_new_tokens=12)
    graphs_before = engine.stats().graphs
    assert graphs_before > 0
    device.broken = True
    replays = device.events.count("replay")
    CALLS.assert_right(engine, model, times=2)
    assert CALLS.one_by_one(model.generate) == want
    assert engine.stats().graphs == graphs_before
    assert "could not be captured" in engine.stats().graph_reason
    assert device.events.count("replay") > replays
    assert sum("can't be captured" in record.message for record in caplog.records) == 1


def test_a_model_that_waits_for_the_device(device: Device) -> None:
    """Seen in the warm-up: nothing is captured. And were it not seen, the capture would fail, and the step is computed."""
    model = models.tiny("llama+dynamic_rope", head_dim=16)
    with hf_cb.continuous_batching(model, **options()) as engine:
        CALLS.assert_right(engine, model)
        assert "its forward waits for the device" in engine.stats().graph_reason
        assert "capture" not in device.events
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "_makes_wait", lambda *_: False)
        with hf_cb.continuous_batching(model, **options()) as engine:
            CALLS.assert_right(engine, model)
            assert "not permitted when stream is capturing" in engine.stats().graph_reason
            assert "capture" in device.events


def test_the_memory_limit(device: Device, model: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(model, **options(max_batch_size=8)) as engine:
        CALLS.assert_right(engine, model)
        without_limit = engine.stats().graphs
    with hf_cb.continuous_batching(model, **options(max_batch_size=8, graph_memory=100_000)) as engine:
        CALLS.assert_right(engine, model, times=2)
        stats = engine.stats()
    assert 0 < stats.graphs < without_limit
    assert "graph_memory is 100000" in stats.graph_reason


def test_what_is_never_captured(device: Device, model: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(model, attention_backend="torch_grouped", pack_memory=0) as engine:
        assert engine.stats().graph_reason == "torch_grouped needs numbers on the host in each step"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "DEVICES", ("cuda",))
        with hf_cb.continuous_batching(model, **options()) as engine:
            assert engine.stats().graph_reason == "CUDA graphs run on cuda, not on cpu"
            CALLS.assert_right(engine, model)
    assert "capture" not in device.events
