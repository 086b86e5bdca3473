"""Changes that the twin cannot follow by sharing weights: it is rebuilt, no answer is stale, and calls in flight end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import inside
import pytest
import torch
from serving import SMALL, Gate, Recorder, Row, ask, long_row, plain, rows, submit, submit_long, together, wait_until
from torch import nn
from torch.utils.hooks import RemovableHandle
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


CHANGES = [replace_module, replace_parameter, wrap_module]


WAYS: dict[str, Callable[[PreTrainedModel, Engine, Row], tuple[int, ...]]] = {
    "generate": lambda model, engine, row: ask(model, row),
    "submit": lambda model, engine, row: submit(engine, row).result().tokens,
    "batch": lambda model, engine, row: engine.generate_batch([row.prompt], max_new_tokens=len(row.tokens))[0].tokens,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("call", WAYS.values(), ids=WAYS)
def test_the_next_call_sees_it(
    llama: PreTrainedModel, engine: Engine, change: Callable[[PreTrainedModel], None], call: Callable[..., tuple[int, ...]]
) -> None:
    row = rows()[6]
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
        gate.after(3)
        change(llama)
        truths = [plain(llama, row.prompt, len(row.tokens)) for row in rows()]

        let = gate.when(lambda: inside.inbox(engine))  # the rebuilt twin waits for those in flight
        *after, _ = together([*(lambda row=row: ask(llama, row) for row in rows()), let])
        assert after == truths
        # Those in flight end with what they began with.
        assert [handle.result().tokens for handle in before] == [row.tokens for row in (long_row(), *rows()[:3])]
        assert engine.stats().native_calls == {}


def add_hook(model: PreTrainedModel, result: Callable[[torch.Tensor], torch.Tensor | None]) -> RemovableHandle:
    """A change that the engine cannot serve."""
    return model.lm_head.register_forward_hook(lambda module, args, output: result(output))


def test_a_change_that_cannot_be_served(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama, max_batch_size=2, **SMALL) as engine, Gate(engine) as gate:
        worker = inside.worker(engine)
        before = [submit(engine, row) for row in rows()[:3]]
        gate.after(2)
        hook = add_hook(llama, lambda output: -output)
        truths = [plain(llama, row.prompt, len(row.tokens)) for row in rows()[:8]]

        def let() -> None:
            wait_until(lambda: worker._closing)
            with pytest.raises(hf_cb.UnsupportedModelError, match="hooks"):
                inside.intake(engine).submit([inside.request(engine, [5])])  # no waiting for those in flight either
            gate.let(float("inf"))

        *after, _ = together([*(lambda row=row: ask(llama, row) for row in rows()[:8]), let])
        assert after == truths
        assert [handle.result().tokens for handle in before] == [row.tokens for row in rows()[:3]]
        assert sum(engine.stats().native_calls.values()) == 8
        with pytest.raises(hf_cb.UnsupportedModelError, match="hooks"):
            submit(engine, rows()[0])
        hook.remove()
        assert submit(engine, rows()[0]).result().tokens == rows()[0].tokens
        assert ask(llama, rows()[1]) == rows()[1].tokens
        assert sum(engine.stats().native_calls.values()) == 8


def test_changes_to_and_fro_while_calls_come_in(llama: PreTrainedModel, engine: Engine) -> None:
    """Which call runs natively is a matter of moments; none fails, and none is wrong."""
    stop = threading.Event()

    def serve(first: int) -> int:
        done = 0
        while not stop.is_set():
            row = rows()[(first + done) % len(rows())]
            streamer = Recorder() if done % 2 else None
            assert ask(llama, row, streamer=streamer) == row.tokens
            if streamer:
                streamer.assert_whole(row)
            done += 1
        return done

    def change() -> int:
        try:
            for i in range(12):
                hook = add_hook(llama, lambda output: None)
                time.sleep(0.02 + 0.005 * i)
                hook.remove()
                time.sleep(0.02 + 0.005 * i)
            return 1
        finally:
            stop.set()

    results = together([*(lambda i=i: serve(i) for i in range(8)), change])
    assert all(isinstance(result, int) and result for result in results), results
    assert ask(llama, rows()[0]) == rows()[0].tokens
    assert engine.stats().native_calls


def test_a_pool_that_shrinks_after_the_check(llama: PreTrainedModel) -> None:
    """A request that no longer fits is refused by itself: it does not take the engine down."""
    with hf_cb.continuous_batching(llama, block_size=4, kv_cache_memory=1 << 16) as engine:
        tokens = engine.config.num_blocks * 4
        request = inside.request(engine, [5] * (tokens - 10), max_new_tokens=10)
        llama.to(torch.float64)
        truth = plain(llama, rows()[0].prompt, len(rows()[0].tokens))
        assert ask(llama, rows()[0]) == truth
        assert engine.config.num_blocks * 4 < tokens - 10
        (handle,) = inside.intake(engine).submit([request])
        with pytest.raises(hf_cb.RequestTooLongError, match="KV cache"):
            handle.result()
        assert ask(llama, rows()[0]) == truth


def test_it_is_rebuilt_once_for_all(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    init = Scheduler.__init__
    monkeypatch.setattr(Scheduler, "__init__", lambda self, *a, **o: (made.append(self), init(self, *a, **o))[1])
    with hf_cb.continuous_batching(llama, **SMALL):
        for change in CHANGES:
            change(llama)
            truths = [plain(llama, row.prompt, len(row.tokens)) for row in rows()[:8]]
            assert together([lambda row=row: ask(llama, row) for row in rows()[:8]]) == truths
    assert len(made) == 1 + len(CHANGES)


def test_cancelled_and_timed_out_behind_the_rebuilding(llama: PreTrainedModel, engine: Engine, gate: Gate) -> None:
    """They need not wait for what they will not use."""
    before = submit_long(engine)
    gate.arrival()
    replace_module(llama)
    row = rows()[1]

    def end_early() -> None:
        wait_until(lambda: inside.inbox(engine))
        requests = [inside.request(engine, row.prompt, timeout=timeout) for timeout in (None, 0.01)]
        cancelled, timed_out = inside.intake(engine).submit(requests)
        cancelled.cancel()
        time.sleep(0.01)
        gate.after(1)
        with pytest.raises(hf_cb.RequestCancelledError):
            cancelled.result(timeout=5)
        with pytest.raises(hf_cb.RequestTimeoutError, match="deadline"):
            timed_out.result(timeout=5)
        assert not before.done
        before.cancel()
        gate.let(float("inf"))

    new, _ = together([lambda: ask(llama, row), end_early])
    assert new == plain(llama, row.prompt, len(row.tokens))


def test_a_change_between_the_check_and_the_submit(
    llama: PreTrainedModel, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = rows()[6]
    recorder = Recorder()

    def change() -> None:
        monkeypatch.undo()
        add_hook(llama, lambda output: None)
        assert together([lambda: ask(llama, rows()[1])]) == [rows()[1].tokens]

    monkeypatch.setattr("hf_cb.intake.release_pool", change)
    assert ask(llama, row, streamer=recorder) == row.tokens
    recorder.assert_whole(row)
    assert sum(engine.stats().native_calls.values()) == 2


def test_another_dtype_with_calls_in_flight(llama: PreTrainedModel, engine: Engine, gate: Gate) -> None:
    """`to()` changes the shared parameters under the steps: those calls end, one way or the other, and no new call is wrong."""
    before = [submit(engine, row) for row in rows()[:4]]
    gate.after(3)
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
            patch.setattr("hf_cb.continuous.build", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ask(llama, row)
        assert ask(llama, row) == plain(llama, row.prompt, len(row.tokens))


def test_rebuilt_by_a_caller_under_autocast(llama: PreTrainedModel, engine: Engine) -> None:
    row = rows()[6]
    replace_module(llama)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ask(llama, row)
    assert ask(llama, row) == plain(llama, row.prompt, len(row.tokens))
    assert sum(engine.stats().native_calls.values()) == 1
