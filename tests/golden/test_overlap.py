"""Steps that are launched before the tokens of the one before are known: no token is another one for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import crowd
import inside
import models
import pytest
import torch
import truth

import hf_cb
from hf_cb.core.output import UNKNOWN, ScheduledRow, SchedulerOutput
from hf_cb.request import FinishReason
from hf_cb.runtime.model_runner import Launched

pytestmark = pytest.mark.timeout(20)

SMALL: dict[str, Any] = {"block_size": 4, "overlap": True}
SITUATIONS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "in chunks": {"max_batch_tokens": 8},
    "few seats": {"max_batch_size": 2},
    "preempted": {"num_blocks": 18},
    "no prefix cache": {"num_blocks": 18, "prefix_cache": False, "max_batch_tokens": 9},
    "swapped": {"num_blocks": 18, "swap_space": "1MiB"},
    "fair and paced": {"policy": "fair", "target_itl_ms": 5.0, "num_blocks": 24},
}


@pytest.fixture
def engine() -> Iterator[hf_cb.Engine]:
    """Of the llama that has rows."""
    with hf_cb.continuous_batching(truth.model("llama"), **SMALL) as engine:
        yield engine


def at_launch(engine: hf_cb.Engine, look: Callable[[SchedulerOutput, bool], None]) -> None:
    """Call `look` with each step that is to be launched, and whether another is underway; what it raises, the launch raises."""
    runner = inside.runner(engine)
    launch = runner.launch

    def looked_at(output: SchedulerOutput, before: Launched | None = None) -> Launched:
        look(output, before is not None)
        return launch(output, before)

    runner.launch = looked_at  # type: ignore[method-assign]


def counted(engine: hf_cb.Engine) -> list[ScheduledRow]:
    """All rows that are launched with tokens that are not known yet."""
    ahead: list[ScheduledRow] = []
    at_launch(engine, lambda output, _: ahead.extend(row for row in output.rows if UNKNOWN in row.token_ids))
    return ahead


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_same_tokens(name: str, situation: str) -> None:
    """Rows that end by length and, half of them, by a token: which is known one step late."""
    model, found = truth.model(name), truth.rows(name) * 2
    wanted = [row.tokens if i % 2 else row.tokens[: row.tokens.index(row.tokens[-3]) + 1] for i, row in enumerate(found)]
    with hf_cb.continuous_batching(model, **SMALL, **SITUATIONS[situation]) as engine:
        ahead = counted(engine)
        with crowd.held(engine, len(found)):
            handles = []
            for i, row in enumerate(found):
                handles += truth.submit(engine, [row], eos_token_id=None if i % 2 else row.tokens[-3], tenant=str(i % 3))
        assert truth.results(handles) == wanted
        assert ahead
        scheduler = inside.scheduler(engine)
        scheduler.check()
        assert scheduler.memory.blocks_used == 0
        # Alone, with what the others have left in the prefix cache.
        for row in truth.rows(name):
            assert truth.results(truth.submit(engine, [row])) == [row.tokens]


@pytest.mark.parametrize("count", [1, 3])
def test_a_pool_that_holds_one_window(count: int) -> None:
    """What a prompt's next part needs, the window gives back: but only when the part before it has ended."""
    model, prompt = truth.model("mistral"), torch.arange(3, 103)[None]
    wanted = truth.plain(model, prompt, 5)
    fewest = (models.WINDOW + 16) // 4 + 2
    with hf_cb.continuous_batching(model, **SMALL, max_batch_tokens=16, num_blocks=fewest, prefix_cache=False) as engine:
        with crowd.held(engine, count):
            handles = [engine.submit(prompt[0], max_new_tokens=5, timeout=15) for _ in range(count)]
        assert truth.results(handles) == [wanted] * count


def test_calls_of_all_kinds_together() -> None:
    """Some of which the host has to see each token of, so that steps are waited for now and then."""
    model = truth.model("llama")
    plain = type(model).generate
    prompts = [row.prompt for row in truth.rows("llama")]
    calls: list[dict[str, Any]] = [
        {"max_new_tokens": 30},
        {"max_new_tokens": 9, "repetition_penalty": 1.3},
        {"max_new_tokens": 12, "num_beams": 3},
        {"max_new_tokens": 25, "do_sample": True, "temperature": 1.5},
        {"max_new_tokens": 11, "no_repeat_ngram_size": 2},
        {"max_new_tokens": 18, "do_sample": True, "top_p": 0.8, "num_return_sequences": 2},
        {"max_new_tokens": 14, "min_new_tokens": 6},
        {"max_new_tokens": 7, "stopping_criteria": [lambda ids, scores, **_: ids.shape[1] % 5 == 0]},
    ]
    want = []
    for i, (prompt, call) in enumerate(zip(prompts, calls, strict=True)):
        torch.manual_seed(i)
        want.append(plain(model, prompt, pad_token_id=0, **call))
    with hf_cb.continuous_batching(model, **SMALL) as engine:
        ahead = counted(engine)
        jobs = [
            lambda i=i, p=p, c=c: model.generate(p, pad_token_id=0, **c, **({"seed": i} if "do_sample" in c else {}))
            for i, (p, c) in enumerate(zip(prompts, calls, strict=True))
        ]
        got = crowd.answers(engine, jobs)
        assert engine.stats().native_calls == {}
        assert ahead
    for i, (a, b, call) in enumerate(zip(got, want, calls, strict=True)):
        if call.get("num_return_sequences"):  # each has a generator of its own; the first one's is plain generate's
            assert a.shape == b.shape
            continue
        assert torch.equal(a, b), (i, call)


def test_a_launch_that_fails_is_tried_again_when_its_turn_comes(engine: hf_cb.Engine) -> None:
    rows = truth.rows("llama")
    failures = [torch.OutOfMemoryError("no memory")] * 3

    def fail_ahead(output: SchedulerOutput, is_ahead: bool) -> None:
        if is_ahead and failures and len(output.rows) > 2:
            raise failures.pop()

    at_launch(engine, fail_ahead)
    with crowd.held(engine, len(rows)):
        handles = truth.submit(engine, rows)
    assert truth.results(handles) == truth.tokens(rows)
    assert not failures
    assert engine.stats().finished == {FinishReason.LENGTH: len(rows)}


def test_only_the_offender_of_a_step_fails(engine: hf_cb.Engine) -> None:
    rows = truth.rows("llama")

    def fail_with_it(output: SchedulerOutput, is_ahead: bool) -> None:
        if any(row.request_id == handles[2].request_id and row.start >= 10 for row in output.rows):
            raise ValueError("it broke")

    at_launch(engine, fail_with_it)
    with crowd.held(engine, len(rows)):
        handles = truth.submit(engine, rows)
    for i, (handle, row) in enumerate(zip(handles, rows, strict=True)):
        if i != 2:
            assert list(handle.result().tokens) == row.tokens
    with pytest.raises(hf_cb.RequestFailedError, match="it broke"):
        handles[2].result()
    assert list(handles[2].tokens) == rows[2].tokens[: len(handles[2].tokens)] != []


def test_a_row_of_nan_fails_alone(engine: hf_cb.Engine) -> None:
    rows = truth.rows("llama")[:4]
    runner = inside.runner(engine)
    forward = runner.forward

    def poisoned(batch: Any) -> torch.Tensor:
        logits = forward(batch)
        if handles[1].request_id in batch.sampling_ids and max(batch.steps[0].key_lens) > 20:
            logits[batch.sampling_ids.index(handles[1].request_id)] = torch.nan
        return logits

    runner.forward = poisoned  # type: ignore[method-assign]
    with crowd.held(engine, len(rows)):
        handles = truth.submit(engine, rows)
    with pytest.raises(hf_cb.RequestFailedError, match="NaN"):
        handles[1].result()
    for i in (0, 2, 3):
        assert list(handles[i].result().tokens) == rows[i].tokens


def test_pauses_and_released_memory(engine: hf_cb.Engine) -> None:
    rows = truth.rows("llama")
    handles = truth.submit(engine, rows)
    for release_kv in (False, True, False):
        next(iter(handles[5]))
        with engine.pause(release_kv=release_kv):
            core = inside.core(engine)
            assert not core.is_underway
            assert core.cache.is_released or not release_kv
    assert truth.results(handles) == truth.tokens(rows)


def test_cancelled_while_a_step_is_underway(engine: hf_cb.Engine) -> None:
    rows = truth.rows("llama")
    with crowd.held(engine, len(rows)):
        handles = truth.submit(engine, rows)
    for handle in handles[::2]:
        next(iter(handle))
        handle.cancel()
    assert truth.results(handles[1::2]) == truth.tokens(rows[1::2])
    for handle, row in zip(handles[::2], rows[::2], strict=True):
        assert list(handle.tokens) == row.tokens[: len(handle.tokens)]
    engine.shutdown()
    assert inside.scheduler(engine).memory.blocks_used == 0


def test_cancelled_as_soon_as_it_is_admitted(engine: hf_cb.Engine) -> None:
    """While the step before is underway, in which it has no part."""
    rows = truth.rows("llama")
    runner = inside.runner(engine)
    launch, handles = runner.launch, truth.submit(engine, rows[1:2])
    late: list[hf_cb.GenerationHandle] = []
    submitting = threading.Lock()  # no step meets a request whose handle is not in the list yet

    def cancel(output: SchedulerOutput, before: Launched | None = None) -> Launched:
        launched = launch(output, before)
        with submitting:
            for handle in late:
                if before is not None and any(row.request_id == handle.request_id for row in output.rows):
                    handle.cancel()
        return launched

    runner.launch = cancel  # type: ignore[method-assign]
    for row in rows[2:6]:
        with submitting:
            late += truth.submit(engine, [row])
        handles += truth.submit(engine, [row])
    assert truth.results(handles) == truth.tokens(rows[1:6])
    for handle in late:
        with pytest.raises(hf_cb.RequestCancelledError):
            handle.result()


def test_weights_changed_between_two_calls() -> None:
    """Nobody begins with keys and values of weights that are gone."""
    model = models.tiny("llama")
    prompt = torch.arange(4, 30)[None]
    with hf_cb.continuous_batching(model, **SMALL) as engine:
        engine.submit(prompt[0], max_new_tokens=8).result()
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(-1.5)
        assert list(engine.submit(prompt[0], max_new_tokens=8).result().tokens) == truth.plain(model, prompt, 8)
