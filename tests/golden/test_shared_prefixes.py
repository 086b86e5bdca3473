"""Keys and values of earlier requests change no token: cold, warm, in company, turn after turn, after the weights changed."""

from __future__ import annotations

from collections.abc import Callable

import crowd
import models
import pytest
import torch
import truth
from transformers import PreTrainedModel

import hf_cb

pytestmark = pytest.mark.timeout(20)

POOL = {"block_size": 4, "num_blocks": 400}
NAMES = ("llama", "mistral", "gemma2", "gpt_oss", "llama4_text", "deepseek_v3", "gpt2", "lfm2", "qwen3_next", "mamba2")


@pytest.mark.parametrize("name", NAMES)
def test_cold_and_warm(name: str) -> None:
    model, rows = truth.model(name), truth.rows(name)
    with hf_cb.continuous_batching(model, **POOL) as engine:
        for cached in (False, True):
            for row in rows:
                result = engine.submit(row.prompt[0], max_new_tokens=len(row.tokens)).result()
                assert list(result.tokens) == row.tokens
                usable = (row.prompt.shape[1] - 1) // 4 * 4
                assert result.num_cached_tokens == (usable if cached else 0)
        stats = engine.stats()
    assert stats.prefix_hits == sum(row.prompt.shape[1] > 4 for row in rows)
    assert stats.cached_tokens == sum((row.prompt.shape[1] - 1) // 4 * 4 for row in rows)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_blocks", [400, 30])
def test_shared_beginnings_in_company(name: str, num_blocks: int) -> None:
    """Every beginning of every row, together and again: hits of all lengths, evictions, preemptions of those who share."""
    model = truth.model(name)
    row = truth.rows(name)[1].full[0]
    cut = [int(n) for n in torch.arange(1, len(row) - 4)]
    truths = {n: row[n : n + 4].tolist() for n in cut if n >= truth.LENGTHS[1][0]}
    with hf_cb.continuous_batching(model, block_size=4, num_blocks=num_blocks, max_batch_tokens=64) as engine:
        for _ in range(2):
            handles = {n: engine.submit(row[:n], max_new_tokens=4, priority=n % 3) for n in cut}
            results = {n: handle.result() for n, handle in handles.items()}
            assert {n: list(results[n].tokens) for n in truths} == truths
        assert engine.stats().cached_tokens > 0
        assert all(list(results[n].tokens) == truth.plain(model, row[None, :n], 4) for n in (3, 4, 5, 8, 9))


def test_a_conversation() -> None:
    """Each turn is the last one with its answer and more: all but the new is found, as far as it fills blocks."""
    model = truth.model("llama")
    generator = torch.Generator().manual_seed(5)
    talk = torch.randint(3, models.VOCAB, (1, 21), generator=generator)
    known = 0
    with hf_cb.continuous_batching(model, **POOL) as engine:
        for _ in range(8):
            want = truth.plain(model, talk, 9)
            result = engine.submit(talk[0], max_new_tokens=9).result()
            assert list(result.tokens) == want
            assert result.num_cached_tokens == known
            known = (talk.shape[1] + 8) // 4 * 4
            said = torch.randint(3, models.VOCAB, (1, 13), generator=generator)
            talk = torch.cat([talk, torch.tensor([want]), said], dim=1)


def test_the_same_prompt_from_many_threads_is_computed_once() -> None:
    model, row = truth.model("llama"), truth.rows("llama")[1]  # 40 tokens
    with hf_cb.continuous_batching(model, record_steps=1000, **POOL) as engine:
        answers = crowd.answers(engine, [lambda: model.generate(row.prompt, max_new_tokens=len(row.tokens))] * 16)
        assert all(answer.tolist() == row.full.tolist() for answer in answers)
        computed = sum(tokens for step in engine.steps() for _, tokens in step.rows)
        assert computed == 40 + 15 * 4 + 16 * (len(row.tokens) - 1)


def test_salts_and_off() -> None:
    model, row = truth.model("llama"), truth.rows("llama")[1]
    salts = ("a", "a", "b", None, None)
    for options, hits in (({}, 2), ({"prefix_cache": False}, 0)):
        with hf_cb.continuous_batching(model, **POOL, **options) as engine:
            for salt in salts:
                out = model.generate(row.prompt, max_new_tokens=len(row.tokens), cache_salt=salt)
                assert out.tolist() == row.full.tolist()
            assert engine.stats().prefix_hits == hits
            for salt in salts:
                assert list(engine.submit(row.prompt, max_new_tokens=3, cache_salt=salt).result().tokens) == row.tokens[:3]


def add_in_place(model: PreTrainedModel, engine: hf_cb.Engine) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.add_(0.5)


def load_a_state(model: PreTrainedModel, engine: hf_cb.Engine) -> None:
    model.load_state_dict({name: -value for name, value in model.state_dict().items()})


def step_an_optimizer(model: PreTrainedModel, engine: hf_cb.Engine) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    model(torch.tensor([[5, 6, 7]])).logits.square().mean().backward()
    optimizer.step()


def write_data_in_a_pause(model: PreTrainedModel, engine: hf_cb.Engine) -> None:
    with engine.pause():
        model.model.layers[0].self_attn.v_proj.weight.data.neg_()


def write_data_and_say_so(model: PreTrainedModel, engine: hf_cb.Engine) -> None:
    model.model.layers[0].self_attn.v_proj.weight.data.neg_()
    engine.reset_prefix_cache()


def replace_a_parameter(model: PreTrainedModel, engine: hf_cb.Engine) -> None:
    projection = model.model.layers[0].self_attn.v_proj
    projection.weight = torch.nn.Parameter(-projection.weight.detach())


CHANGES = [add_in_place, load_a_state, step_an_optimizer, write_data_in_a_pause, write_data_and_say_so, replace_a_parameter]


@pytest.mark.parametrize("change", CHANGES)
def test_no_stale_answer_after_the_weights_changed(
    llama: PreTrainedModel, change: Callable[[PreTrainedModel, hf_cb.Engine], None]
) -> None:
    row = truth.rows("llama")[1]
    with hf_cb.continuous_batching(llama, **POOL) as engine:
        for _ in range(2):
            assert llama.generate(row.prompt, max_new_tokens=9).tolist() == row.full[:, :49].tolist()
        assert engine.stats().prefix_hits == 1
        change(llama, engine)
        want = truth.plain(llama, row.prompt, 9)
        assert want != row.tokens
        first, second = (engine.submit(row.prompt, max_new_tokens=9).result() for _ in range(2))
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 36)
        assert list(first.tokens) == list(second.tokens) == want


def test_weights_changed_while_others_run(llama: PreTrainedModel) -> None:
    """What runs on, from old keys and values, is nothing that a later request may begin with."""
    row = truth.rows("llama")[1]
    with hf_cb.continuous_batching(llama, **POOL) as engine:
        long = engine.submit(row.prompt, max_new_tokens=200)
        next(iter(long))
        with engine.pause():
            add_in_place(llama, engine)
        long.result()
        mixed = torch.tensor([[*row.prompt[0].tolist(), *long.tokens]])[:, :100]
        result = engine.submit(mixed[0], max_new_tokens=5).result()
        assert (result.num_cached_tokens, list(result.tokens)) == (0, truth.plain(llama, mixed, 5))
