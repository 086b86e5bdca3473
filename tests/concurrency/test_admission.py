"""More than can be served: who is turned away learns at once how long the queue is, and who waits too long leaves it."""

from __future__ import annotations

import time

import inside
import pytest
from serving import SMALL, Gate, rows, submit, submit_long, together, wait_until
from transformers import PreTrainedModel

import hf_cb
from hf_cb import EngineOverloadedError, FinishReason, RequestTimeoutError

pytestmark = pytest.mark.timeout(20)


def test_a_full_queue(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama, max_batch_size=2, max_queue_size=3, **SMALL) as engine, Gate(engine) as gate:
        running = [submit(engine, row) for row in rows()[6:8]]
        gate.arrival()
        waiting = [submit(engine, row) for row in rows()[8:11]]
        for refused in (
            lambda: submit(engine, rows()[0]),
            lambda: engine.generate_batch([rows()[0].prompt], max_new_tokens=2),
            lambda: llama.generate(rows()[0].ids, max_new_tokens=2),
        ):
            with pytest.raises(
                EngineOverloadedError, match=r"^max_queue_size: takes at most 3 .*; [34] wait and [12] run, and 1 "
            ):
                refused()
        waiting[0].cancel()
        gate.let(float("inf"))
        assert [handle.result().tokens for handle in (*running, *waiting[1:])] == [
            row.tokens for row in (*rows()[6:8], *rows()[9:11])
        ]
        assert submit(engine, rows()[0]).result().tokens == rows()[0].tokens
        assert engine.stats().native_calls == {}


def test_all_rows_of_a_call_or_none(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama, max_batch_size=2, max_queue_size=3, **SMALL) as engine:
        with pytest.raises(EngineOverloadedError, match="6 more"):
            engine.generate_batch([rows()[0].prompt] * 6, max_new_tokens=3)
        assert engine.stats().finished == {}
        results = engine.generate_batch([rows()[0].prompt] * 5, max_new_tokens=3)  # two can run at once
        assert [result.tokens for result in results] == [rows()[0].tokens[:3]] * 5


def test_no_queue_at_all(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama, max_batch_size=2, max_queue_size=0, **SMALL) as engine, Gate(engine) as gate:
        handles = [submit(engine, row) for row in rows()[6:8]]
        with pytest.raises(EngineOverloadedError):
            submit(engine, rows()[0])
        gate.let(float("inf"))
        assert [handle.result().tokens for handle in handles] == [row.tokens for row in rows()[6:8]]


def test_who_was_not_admitted_in_time_leaves(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama, max_batch_size=1, queue_timeout=0.1, **SMALL) as engine:
        running = submit_long(engine)
        next(iter(running))
        waiting = submit(engine, rows()[6])
        began = time.monotonic()
        with pytest.raises(RequestTimeoutError, match=r"^queue_timeout: .* within 0.1 s; \d wait and 1 run"):
            waiting.result()
        assert time.monotonic() - began < 5
        assert not running.done  # it was admitted
        running.cancel()
        assert submit(engine, rows()[6]).result().tokens == rows()[6].tokens
        wait_until(lambda: engine.stats().running == 0)
        assert engine.stats().finished == {FinishReason.TIMEOUT: 1, FinishReason.CANCELLED: 1, FinishReason.LENGTH: 1}


def test_while_the_engine_is_paused_too(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama, queue_timeout=0.05, **SMALL) as engine:
        with engine.pause():
            handle = submit(engine, rows()[6])
            with pytest.raises(RequestTimeoutError, match=r"^queue_timeout: "):
                handle.result()
        assert submit(engine, rows()[6]).result().tokens == rows()[6].tokens


def test_generate_takes_a_timeout_priority_and_tenant(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama, max_batch_size=1, policy="priority", **SMALL) as engine, Gate(engine) as gate:
        first = submit(engine, rows()[6])
        gate.arrival()
        order: list[int] = []

        def ask(i: int) -> None:
            out = llama.generate(rows()[i].ids, max_new_tokens=len(rows()[i].tokens), priority=10 - i, tenant=f"t{i}")
            order.append(i)
            assert tuple(out[0, len(rows()[i].prompt) :].tolist()) == rows()[i].tokens

        let = gate.when(lambda: len(inside.inbox(engine)) + engine.stats().waiting == 3)
        assert together([lambda: ask(0), lambda: ask(1), lambda: ask(2), let]) == [None] * 4
        assert first.result().tokens == rows()[6].tokens
        assert order == [2, 1, 0]
        with engine.pause():
            (end,) = together([lambda: llama.generate(rows()[3].ids, max_new_tokens=5, timeout=0.01)])
        assert isinstance(end, RequestTimeoutError)
        assert "deadline" in str(end)
    for wrong in ({"priority": 1.5}, {"tenant": 3}, {"cache_salt": b"x"}, {"timeout": 0}, {"priority": True}):
        with (
            hf_cb.continuous_batching(llama, **SMALL) as engine,
            pytest.raises(hf_cb.InvalidArgumentError, match=rf"^{next(iter(wrong))}: takes"),
        ):
            llama.generate(rows()[3].ids, max_new_tokens=5, **wrong)
