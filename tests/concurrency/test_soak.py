"""Everything at once, at random, over a pool that is too small: who survives is right, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable

import pytest
from serving import Row, ask, plain, rows, submit, together
from transformers import PreTrainedModel

import hf_cb
from hf_cb import Engine, FinishReason, RequestTimeoutError

pytestmark = pytest.mark.timeout(60)

NUM_THREADS = 16
SECONDS = 6.0
SAMPLED = 8  # rows that also have a sampled truth

Act = Callable[[PreTrainedModel, Engine, Row, random.Random], None]


def sampling(index: int) -> dict[str, float]:
    return {"temperature": 0.7 + 0.1 * index, "top_k": 40, "top_p": 0.95}


def generate(model: PreTrainedModel, engine: Engine, row: Row, chance: random.Random) -> None:
    assert ask(model, row) == row.tokens


def stream(model: PreTrainedModel, engine: Engine, row: Row, chance: random.Random) -> None:
    assert tuple(submit(engine, row)) == row.tokens


def wait_in_a_loop(model: PreTrainedModel, engine: Engine, row: Row, chance: random.Random) -> None:
    async def main() -> tuple[int, ...]:
        return tuple([token async for token in submit(engine, row)])

    assert asyncio.run(main()) == row.tokens


def batch(model: PreTrainedModel, engine: Engine, row: Row, chance: random.Random) -> None:
    results = engine.generate_batch([row.prompt] * 3, max_new_tokens=len(row.tokens))
    assert [result.tokens for result in results] == [row.tokens] * 3


def cancel(model: PreTrainedModel, engine: Engine, row: Row, chance: random.Random) -> None:
    handle = submit(engine, row)
    for _, token in zip(range(chance.randrange(len(row.tokens))), handle, strict=False):
        assert token in row.tokens
    handle.cancel()
    try:
        assert handle.result().tokens == row.tokens
    except hf_cb.RequestCancelledError:
        assert handle.tokens == row.tokens[: len(handle.tokens)]


def drop(model: PreTrainedModel, engine: Engine, row: Row, chance: random.Random) -> None:
    handle = submit(engine, row)
    time.sleep(chance.random() * 0.02)
    del handle


def time_out(model: PreTrainedModel, engine: Engine, row: Row, chance: random.Random) -> None:
    handle = submit(engine, row, timeout=0.001 + chance.random() * 0.05)
    try:
        assert handle.result().tokens == row.tokens
    except RequestTimeoutError:
        assert handle.tokens == row.tokens[: len(handle.tokens)]


def too_long(model: PreTrainedModel, engine: Engine, row: Row, chance: random.Random) -> None:
    with pytest.raises(hf_cb.RequestTooLongError):
        submit(engine, row, max_new_tokens=300)


def pause(model: PreTrainedModel, engine: Engine, row: Row, chance: random.Random) -> None:
    with engine.pause():
        steps = engine.stats().steps
        time.sleep(chance.random() * 0.005)
        assert engine.stats().steps == steps


ACTS: dict[Act, int] = {
    generate: 6,
    stream: 3,
    wait_in_a_loop: 2,
    batch: 1,
    cancel: 2,
    drop: 2,
    time_out: 2,
    too_long: 1,
    pause: 1,
}


def test_everything_at_once(llama: PreTrainedModel) -> None:
    some = enumerate(rows()[:SAMPLED])
    truths = [plain(llama, row.prompt, len(row.tokens), seed=i, do_sample=True, **sampling(i)) for i, row in some]
    assert all(truth != row.tokens for truth, row in zip(truths, rows(), strict=False))
    options = {"block_size": 4, "num_blocks": 40, "max_batch_tokens": 48, "max_batch_size": 12}
    with hf_cb.continuous_batching(llama, **options) as engine:

        def sample(index: int) -> None:
            options = {"do_sample": True, "seed": index, **sampling(index)}
            if index % 2:
                assert ask(llama, rows()[index], **options) == truths[index]
            else:
                assert submit(engine, rows()[index], **options).result().tokens == truths[index]

        def act_at_random(seed: int) -> Counter[str]:
            chance, done = random.Random(seed), Counter[str]()
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                if chance.random() < 0.2:
                    sample(chance.randrange(SAMPLED))
                    done["sample"] += 1
                    continue
                (act,) = chance.choices(list(ACTS), list(ACTS.values()))
                act(llama, engine, chance.choice(rows()), chance)
                done[act.__name__] += 1
            return done

        results = together([lambda i=i: act_at_random(i) for i in range(NUM_THREADS)])
        errors = [result for result in results if isinstance(result, BaseException)]
        assert not errors, errors
        assert set(sum(results, Counter())) == {"sample", *(act.__name__ for act in ACTS)}
        stats = engine.stats()
        assert stats.native_calls == {}
        assert stats.preemptions > 0
        assert {FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.TIMEOUT} == set(stats.finished)
        assert stats.mean_batch_size > 2
