"""Models whose layers keep a state: nothing that the engine does to their rows changes a token."""

from __future__ import annotations

import threading
from typing import Any

import crowd
import inside
import models
import pytest
import torch
import truth

import hf_cb
from hf_cb.core.output import SchedulerOutput, StepResult
from hf_cb.core.swap_cost import SwapCost

pytestmark = pytest.mark.timeout(60)

NAMES = (
    "falcon_h1",
    "lfm2",
    "mamba",
    "qwen3_next",
    "rwkv",
)  # both in a layer, convolution, one scan alone, delta rule, row by row
SITUATIONS: dict[str, dict[str, Any]] = {
    "few seats": {"max_batch_size": 3, "max_batch_tokens": 9},
    "no prefix cache": {"prefix_cache": False, "max_batch_tokens": 13},
    "one step ahead": {"overlap": True, "max_batch_tokens": 16},
    "fair and paced": {"policy": "fair", "target_itl_ms": 5.0},
}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_same_tokens(name: str, situation: str) -> None:
    """Twice: the second time, what the first one saved is found. Nobody's call ran natively."""
    model, rows = truth.model(name), truth.rows(name) * 3
    with hf_cb.continuous_batching(model, block_size=4, **SITUATIONS[situation]) as engine:
        for _ in range(2):
            with crowd.held(engine, len(rows)):
                handles = truth.submit(engine, rows)
            assert truth.results(handles) == truth.tokens(rows)
            inside.scheduler(engine).check()
        stats = engine.stats()
    assert not stats.native_calls
    assert (stats.cached_tokens > 0) == (situation != "no prefix cache")


@pytest.mark.parametrize("name", ["falcon_h1", "lfm2", "qwen3_next"])
@pytest.mark.parametrize("swap_space", [0, "1MiB"])
def test_preempted(name: str, swap_space: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapCost, "is_cheaper", lambda *_: True)  # whatever was measured
    model, rows = truth.model(name), truth.rows(name) * 2
    with hf_cb.continuous_batching(model, block_size=4, num_blocks=14, swap_space=swap_space) as engine:
        with crowd.held(engine, len(rows)):
            handles = [handle for i, row in enumerate(rows) for handle in truth.submit(engine, [row], cache_salt=str(i))]
        assert truth.results(handles) == truth.tokens(rows)
        inside.scheduler(engine).check()
        stats = engine.stats()
    assert stats.preemptions > 0
    assert (stats.swaps > 0) == bool(swap_space)


@pytest.mark.parametrize("name", NAMES)
def test_turns_of_a_chat(name: str) -> None:
    """Each turn begins where the answer of the one before has filled its last block."""
    model, known = truth.model(name), 0
    generator = torch.Generator().manual_seed(5)
    talk = torch.randint(3, models.VOCAB, (1, 21), generator=generator)
    with hf_cb.continuous_batching(model, block_size=4) as engine:
        for _ in range(4):
            want = truth.plain(model, talk, 9)
            result = engine.submit(talk[0], max_new_tokens=9).result()
            assert list(result.tokens) == want
            assert result.num_cached_tokens == known
            known = (talk.shape[1] + 8) // 4 * 4
            said = torch.randint(3, models.VOCAB, (1, 13), generator=generator)
            talk = torch.cat([talk, torch.tensor([want]), said], dim=1)


def test_where_prompts_part_is_computed_twice_at_most() -> None:
    """Eight prompts with one beginning: the first tells nobody where they part, the second saves its state there."""
    model = truth.model("lfm2")
    generator = torch.Generator().manual_seed(6)
    common = torch.randint(3, models.VOCAB, (1, 32), generator=generator)
    prompts = [torch.cat([common, torch.randint(3, models.VOCAB, (1, 7), generator=generator)], 1) for _ in range(8)]
    with hf_cb.continuous_batching(model, block_size=4) as engine:
        with crowd.held(engine, len(prompts)):
            handles = [engine.submit(prompt[0], max_new_tokens=5) for prompt in prompts]
        results = [handle.result() for handle in handles]
    assert [list(result.tokens) for result in results] == [truth.plain(model, prompt, 5) for prompt in prompts]
    assert sorted(result.num_cached_tokens for result in results) == [0, 0] + [32] * 6


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(
    "options", [{"num_return_sequences": 4, "do_sample": True}, {"num_beams": 3, "num_return_sequences": 2}]
)
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "mamba"])
def test_samples_and_beams(name: str, options: dict[str, Any], prefix_cache: bool) -> None:
    """Both share their prompt's state. A seed's samples are those of plain generate after `torch.manual_seed`, one by one."""
    model, row = truth.model(name), truth.rows(name)[1]
    with hf_cb.continuous_batching(model, block_size=4, prefix_cache=prefix_cache) as engine:
        if "num_beams" in options:
            got = model.generate(row.prompt, max_new_tokens=12, **options)
            assert got.tolist() == type(model).generate(model, row.prompt, max_new_tokens=12, **options).tolist()
        else:
            got = model.generate(row.prompt, max_new_tokens=12, seed=3, **options)
            alone = [
                engine.submit(row.prompt[0], max_new_tokens=12, do_sample=True, seed=3 + i).result().tokens for i in range(4)
            ]
            assert len({tuple(tokens) for tokens in alone}) > 1
            torch.manual_seed(3)
            plain = type(model).generate(model, row.prompt, max_new_tokens=12, do_sample=True)
            assert got[0].tolist() == plain[0].tolist()
        assert not engine.stats().native_calls


@pytest.mark.parametrize("name", NAMES)
def test_a_neighbour_that_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that has moved states and then fails is computed again in parts, from the states before it."""
    model, rows = truth.model(name), truth.rows(name)
    with hf_cb.continuous_batching(model, block_size=4) as engine:
        runner = inside.runner(engine)
        collect, bad, failed = runner.collect, threading.Event(), []

        def failing(launched: Any) -> StepResult:
            output: SchedulerOutput = launched.output
            if bad.is_set() and any(row.request_id == poisoned.request_id for row in output.rows):
                failed.append(len(output.rows))
                raise RuntimeError("a bad row")
            return collect(launched)

        def execute(output: SchedulerOutput, before: Any = None) -> StepResult:
            return failing(runner.launch(output, before))

        monkeypatch.setattr(runner, "execute", execute)
        with crowd.held(engine, len(rows) + 1):
            poisoned = engine.submit([5, 6, 7, 8], max_new_tokens=40)
            handles = truth.submit(engine, rows)
        next(iter(poisoned))
        bad.set()
        assert truth.results(handles) == truth.tokens(rows)
        with pytest.raises(RuntimeError, match="a bad row"):
            poisoned.result()
        inside.scheduler(engine).check()
    assert len(failed) > 1


def test_the_memory_is_given_back_and_weights_change() -> None:
    model = models.tiny("qwen3_next")
    row = truth.rows("qwen3_next")[1]
    with hf_cb.continuous_batching(model, block_size=4) as engine:
        assert engine.submit(row.prompt[0], max_new_tokens=len(row.tokens)).result().tokens == tuple(row.tokens)
        with engine.pause(release_kv=True), torch.no_grad():
            model.get_input_embeddings().weight.mul_(0.5)
        want = truth.plain(model, row.prompt, 9)
        result = engine.submit(row.prompt[0], max_new_tokens=9).result()
        assert list(result.tokens) == want
        assert result.num_cached_tokens == 0


def test_cancelled_on_the_way() -> None:
    model, rows = truth.model("lfm2"), truth.rows("lfm2")
    with hf_cb.continuous_batching(model, block_size=4, max_batch_tokens=9) as engine:
        with crowd.held(engine, len(rows) + 1):
            leaving = engine.submit(list(range(3, 60)), max_new_tokens=30)
            handles = truth.submit(engine, rows)
        leaving.cancel()
        assert truth.results(handles) == truth.tokens(rows)
        inside.scheduler(engine).check()


def test_seats_for_which_there_are_no_states() -> None:
    model = truth.model("qwen3_next")
    with pytest.raises(hf_cb.InvalidArgumentError, match=r"^max_batch_size: 64 sequences take two states of \d+ bytes each"):
        hf_cb.install(model, max_batch_size=64, kv_cache_memory="1MiB")
    with hf_cb.continuous_batching(model, kv_cache_memory="1MiB") as engine:  # fewer, by itself
        assert 1 <= engine.config.max_batch_size < 64
        assert engine.config.num_state_slots >= 2 * engine.config.max_batch_size
