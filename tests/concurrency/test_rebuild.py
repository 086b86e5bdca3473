"""Changes that the twin cannot follow by sharing weights: it is rebuilt, no answer is stale, and calls in flight end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from serving import SMALL, Gate, Row, ask, long_row, plain, rows, submit, together, wait_until
from torch import nn
from transformers import PreTrainedModel

import hf_cb
from hf_cb import Engine, RequestFailedError
from hf_cb.core.scheduler import Scheduler

pytestmark = pytest.mark.timeout(20)


def replace_module(model: PreTrainedModel) -> None:
    head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False)
    with torch.no_grad():
        head.weight.copy_(-model.lm_head.weight)
    model.lm_head = head


def replace_parameter(model: PreTrainedModel) -> None:
    projection = model.model.layers[1].self_attn.v_proj
    projection.weight = nn.Parameter(-projection.weight.detach())


def wrap_module(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, nn.Tanh())  # as adapters do


def add_hook(model: PreTrainedModel) -> None:
    model.model.layers[2].register_forward_hook(lambda module, args, output: -output)


CHANGES = [replace_module, replace_parameter, wrap_module, add_hook]


def by_generate(model: PreTrainedModel, engine: Engine, row: Row) -> tuple[int, ...]:
    return ask(model, row)


def by_submit(model: PreTrainedModel, engine: Engine, row: Row) -> tuple[int, ...]:
    return submit(engine, row).result().tokens


def by_batch(model: PreTrainedModel, engine: Engine, row: Row) -> tuple[int, ...]:
    return engine.generate_batch([row.prompt], max_new_tokens=len(row.tokens))[0].tokens


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("call", [by_generate, by_submit, by_batch])
def test_the_next_call_sees_it(
    llama: PreTrainedModel, change: Callable[[PreTrainedModel], None], call: Callable[..., tuple[int, ...]]
) -> None:
    row = rows()[6]
    with hf_cb.continuous_batching(llama, **SMALL) as engine:
        assert call(llama, engine, row) == row.tokens
        change(llama)
        truth = plain(llama, row.prompt, len(row.tokens))
        assert truth != row.tokens
        assert call(llama, engine, row) == truth
        assert engine.stats().native_calls == {}


@pytest.mark.parametrize("change", CHANGES)
def test_with_calls_in_flight(llama: PreTrainedModel, change: Callable[[PreTrainedModel], None]) -> None:
    with hf_cb.continuous_batching(llama, max_batch_size=2, **SMALL) as engine, Gate(engine) as gate:
        before = [submit(engine, row) for row in (long_row(), *rows()[:3])]  # two run and two wait
        gate.let(3)
        gate.arrival()
        change(llama)
        truths = [plain(llama, row.prompt, len(row.tokens)) for row in rows()]

        def let() -> None:
            wait_until(lambda: engine._worker._inbox)  # the rebuilt twin waits for those in flight
            gate.let(float("inf"))

        *after, _ = together([*(lambda row=row: ask(llama, row) for row in rows()), let])
        assert after == truths
        # Those in flight end with what they began with.
        assert [handle.result().tokens for handle in before] == [row.tokens for row in (long_row(), *rows()[:3])]
        assert engine.stats().native_calls == {}


def test_it_is_rebuilt_once_for_all(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    init = Scheduler.__init__
    monkeypatch.setattr(Scheduler, "__init__", lambda self, **options: (made.append(self), init(self, **options))[1])
    with hf_cb.continuous_batching(llama, **SMALL):
        for change in CHANGES:
            change(llama)
            truths = [plain(llama, row.prompt, len(row.tokens)) for row in rows()[:8]]
            assert together([lambda row=row: ask(llama, row) for row in rows()[:8]]) == truths
    assert len(made) == 1 + len(CHANGES)


def test_cancelled_and_timed_out_behind_the_rebuilding(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama, **SMALL) as engine, Gate(engine) as gate:
        before = submit(engine, long_row())
        gate.arrival()
        replace_module(llama)

        def let() -> None:
            wait_until(lambda: engine._worker._inbox)
            gate.let(float("inf"))

        def cancelled() -> None:
            handle = submit(engine, rows()[0])
            handle.cancel()
            handle.result()

        ended, new, _ = together([cancelled, lambda: ask(llama, rows()[1]), let])
        assert isinstance(ended, hf_cb.RequestCancelledError)
        assert new == plain(llama, rows()[1].prompt, len(rows()[1].tokens))
        assert before.result().tokens == long_row().tokens


def test_another_dtype_with_calls_in_flight(llama: PreTrainedModel) -> None:
    """`to()` changes the shared parameters under the steps: those calls end, one way or the other, and no new call is wrong."""
    with hf_cb.continuous_batching(llama, **SMALL) as engine, Gate(engine) as gate:
        before = [submit(engine, row) for row in rows()[:4]]
        gate.let(3)
        gate.arrival()
        llama.to(torch.float64)
        truths = [plain(llama, row.prompt, len(row.tokens)) for row in rows()[:4]]
        gate.let(float("inf"))
        assert together([lambda row=row: ask(llama, row) for row in rows()[:4]]) == truths
        for handle, row in zip(before, rows(), strict=False):
            try:
                assert handle.result().tokens == row.tokens
            except RequestFailedError:
                assert handle.tokens == row.tokens[: len(handle.tokens)]
        assert engine.stats().blocks_used == 0


def test_a_rebuilding_that_fails_is_tried_again(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    row = rows()[6]
    with hf_cb.continuous_batching(llama, **SMALL):
        replace_module(llama)
        with monkeypatch.context() as patch:
            patch.setattr("hf_cb.backend.build", lambda model, config: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ask(llama, row)
        assert ask(llama, row) == plain(llama, row.prompt, len(row.tokens))


def test_rebuilt_by_a_caller_under_autocast(llama: PreTrainedModel) -> None:
    row = rows()[6]
    with hf_cb.continuous_batching(llama, **SMALL) as engine:
        replace_module(llama)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ask(llama, row)
        assert ask(llama, row) == plain(llama, row.prompt, len(row.tokens))
        assert sum(engine.stats().native_calls.values()) == 1
