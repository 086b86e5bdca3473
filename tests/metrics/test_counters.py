"""What `engine.stats()` counts: every request once, in histograms too, and never less than before."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import crowd
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import hf_cb
from hf_cb.stats import Distribution, Histogram

pytestmark = pytest.mark.timeout(20)

PROMPTS = [list(range(3 + i, 9 + 2 * i)) for i in range(6)]


@pytest.fixture
def engine(llama: PreTrainedModel) -> Iterator[hf_cb.Engine]:
    with hf_cb.continuous_batching(llama, max_batch_tokens=32) as engine:
        yield engine


def falling(before: hf_cb.EngineStats, after: hf_cb.EngineStats) -> list[str]:
    """The names of the counters that are less than they were."""
    found = []
    for field in dataclasses.fields(before.distributions):
        old, new = getattr(before.distributions, field.name), getattr(after.distributions, field.name)
        found += (
            [field.name] if any(a > b for a, b in zip(old.counts, new.counts, strict=True)) or old.total > new.total else []
        )
    for name in ("finished", "native_calls"):
        old, new = getattr(before, name), getattr(after, name)
        found += [name] if any(number > new.get(key, 0) for key, number in old.items()) else []
    counters = ("steps", "prompt_tokens", "output_tokens", "preemptions", "swaps", "step_seconds", "model_seconds")
    more = ("prefix_hits", "cached_tokens", "admitted_tokens", "rejected")
    return found + [name for name in counters + more if getattr(before, name) > getattr(after, name)]


def test_a_histogram_counts_by_upper_bounds() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 5, 6, 100):
        histogram.observe(value)
    assert histogram.snapshot() == Distribution((1, 2, 5), (2, 1, 1, 2), 114.0)
    assert histogram.snapshot().count == 6


def test_every_token_and_request_is_in_the_histograms(engine: hf_cb.Engine) -> None:
    results = engine.generate_batch(PROMPTS, max_new_tokens=5, eos_token_id=None)
    stats = engine.stats()
    found = stats.distributions
    num_tokens = sum(len(result.tokens) for result in results)
    for of_requests in (found.time_to_first_token, found.queue, found.prefill, found.decode, found.end_to_end):
        assert of_requests.count == len(PROMPTS)
    assert found.inter_token.count == num_tokens - len(PROMPTS)
    assert (found.prompt_tokens.total, found.output_tokens.total) == (sum(map(len, PROMPTS)), num_tokens)
    assert found.step_tokens.count == stats.steps
    assert found.step_tokens.total == sum(map(len, PROMPTS)) + num_tokens - len(PROMPTS) - stats.cached_tokens
    assert stats.admitted_tokens == stats.prompt_tokens == sum(map(len, PROMPTS))
    assert found.end_to_end.total == pytest.approx(sum(result.finished_at - result.submitted_at for result in results))
    first_tokens = sum(result.first_token_at - result.submitted_at for result in results)
    assert found.time_to_first_token.total == pytest.approx(first_tokens)
    assert found.queue.total + found.prefill.total == pytest.approx(first_tokens)


def test_what_has_no_answer_counts_by_how_it_ended_alone(engine: hf_cb.Engine) -> None:
    with engine.pause():
        cancelled = engine.submit(PROMPTS[0], max_new_tokens=5)
        cancelled.cancel()
        late = engine.submit(PROMPTS[1], max_new_tokens=5, timeout=1e-6)
    for handle, error in ((cancelled, hf_cb.RequestCancelledError), (late, hf_cb.RequestTimeoutError)):
        with pytest.raises(error):
            handle.result()
    stats = engine.stats()
    assert stats.finished == {hf_cb.FinishReason.CANCELLED: 1, hf_cb.FinishReason.TIMEOUT: 1}
    assert stats.distributions.end_to_end.count == 0


def test_beams_count_as_one_request(engine: hf_cb.Engine, llama: PreTrainedModel) -> None:
    llama.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=4, num_beams=3, do_sample=False, eos_token_id=None)
    found = engine.stats().distributions
    assert (found.time_to_first_token.count, found.inter_token.count, found.output_tokens.total) == (1, 0, 4)


def test_a_full_queue_counts_whom_it_refuses(llama: PreTrainedModel) -> None:
    with hf_cb.continuous_batching(llama, max_queue_size=0, max_batch_size=1) as engine:
        with engine.pause():
            first = engine.submit(PROMPTS[0], max_new_tokens=2)
            with pytest.raises(hf_cb.EngineOverloadedError):
                engine.submit(PROMPTS[1], max_new_tokens=2)
        first.result()
        assert engine.stats().rejected == 1


def test_requests_that_a_shutdown_ends_are_counted(engine: hf_cb.Engine) -> None:
    with engine.pause():
        handles = [engine.submit(prompt, max_new_tokens=5) for prompt in PROMPTS]
        engine.shutdown(drain=False)
    for handle in handles:
        with pytest.raises(hf_cb.EngineClosedError):
            handle.result()
    assert engine.stats().finished == {hf_cb.FinishReason.FAILED: len(PROMPTS)}


def new_head(model: PreTrainedModel) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def test_no_counter_falls_when_the_model_is_rebuilt_or_goes_native(llama: PreTrainedModel) -> None:
    """Preemptions, swaps and all: the core is another one after each of these, twice there is none."""
    snapshots = []
    with hf_cb.continuous_batching(llama, num_blocks=9, block_size=4, swap_space="1MiB", prefix_cache=False) as engine:

        def serve() -> None:
            llama.generate(torch.tensor([PROMPTS[0]]), **OPTIONS)  # the engine is up to date from here on
            crowd.answers(
                engine, [lambda prompt=prompt: llama.generate(torch.tensor([prompt]), **OPTIONS) for prompt in PROMPTS]
            )
            snapshots.append(engine.stats())

        serve()
        new_head(llama)
        serve()
        hook = llama.register_forward_hook(lambda *_: None)  # no engine serves a model with one
        llama.generate(torch.tensor([PROMPTS[0]]), **OPTIONS)
        snapshots.append(engine.stats())
        hook.remove()
        serve()
    assert snapshots[0].preemptions > 0
    assert snapshots[0].preemptions < snapshots[1].preemptions == snapshots[2].preemptions < snapshots[3].preemptions
    assert snapshots[2].max_running == 0
    assert sum(snapshots[2].native_calls.values()) == 1
    assert [falling(before, after) for before, after in itertools.pairwise(snapshots)] == [[], [], []]


OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


def test_preemptions_of_a_pause_are_counted_once(engine: hf_cb.Engine) -> None:
    handle = engine.submit(PROMPTS[0], max_new_tokens=200, eos_token_id=None)
    next(iter(handle))
    with engine.pause(release_kv=True):
        during = engine.stats().preemptions
    handle.cancel()
    with pytest.raises(hf_cb.RequestCancelledError):
        handle.result()
    assert during == engine.stats().preemptions == 1
