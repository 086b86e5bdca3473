"""What fits exactly, what is one token too long, and who learns of it where."""

from __future__ import annotations

import crowd
import inside
import models
import pytest
from serving import Gate, ask, plain, rows, submit, together
from transformers import PreTrainedModel

import hf_cb
from hf_cb import FinishReason, InvalidArgumentError, RequestTooLongError

pytestmark = pytest.mark.timeout(20)

POOL = {"block_size": 4, "num_blocks": 6}
FITS = 25  # tokens: 24 slots, and the last token needs none


def test_what_fits_exactly(llama: PreTrainedModel) -> None:
    row = next(row for row in rows() if len(row.prompt) < FITS - 10)
    new = FITS - len(row.prompt)
    truth = plain(llama, row.prompt, new)
    with hf_cb.continuous_batching(llama, **POOL) as engine:
        assert engine.submit(row.prompt, max_new_tokens=new).result().tokens == truth
        with crowd.held(engine, 6):
            handles = [engine.submit(row.prompt, max_new_tokens=new) for _ in range(6)]
        assert [handle.result().tokens for handle in handles] == [truth] * 6
        assert engine.stats().native_calls == {}
        assert engine.stats().preemptions > 0


def test_one_token_too_many(llama: PreTrainedModel) -> None:
    row = rows()[0]
    with hf_cb.continuous_batching(llama, **POOL) as engine, Gate(engine) as gate:
        other = submit(engine, row)
        gate.arrival()  # the engine stands still: only the caller's own thread can refuse
        too_many = FITS - len(row.prompt) + 1
        for refused in (
            lambda: engine.submit(row.prompt, max_new_tokens=too_many),
            lambda: engine.generate_batch([row.prompt, row.prompt], max_new_tokens=too_many),
            lambda: llama.generate(row.ids, max_new_tokens=too_many),
            lambda: engine.submit(list(range(3, 3 + FITS)), max_new_tokens=1),
            lambda: llama.generate(row.ids.expand(2, -1), max_new_tokens=too_many),
        ):
            with pytest.raises(RequestTooLongError, match=rf"^max_new_tokens.*\b{FITS}\b"):
                refused()
        assert (engine.stats().waiting, engine.stats().running) == (0, 1)
        gate.let(float("inf"))
        assert other.result().tokens == row.tokens
        assert ask(llama, row) == row.tokens
        assert engine.stats().finished == {FinishReason.LENGTH: 2}


def test_beyond_the_models_positions() -> None:
    llama = models.tiny("llama")
    with hf_cb.continuous_batching(llama) as engine:
        positions = llama.config.max_position_embeddings
        with pytest.raises(RequestTooLongError, match=rf"\b{positions}\b"):
            engine.submit([5] * positions, max_new_tokens=1)
        prompt = [5, 6] * (positions // 2 - 1)
        assert engine.submit(prompt, max_new_tokens=2).result().tokens == plain(llama, prompt, 2)


def test_no_request_shares_an_id(llama: PreTrainedModel) -> None:
    row, ids = rows()[0], []
    with hf_cb.continuous_batching(llama, **POOL) as engine:

        def submit_some() -> None:
            for _ in range(5):
                handle = submit(engine, row)
                ids.append(handle.request_id)
                assert handle.result().tokens == row.tokens

        assert together([submit_some] * 8) == [None] * 8
    assert len(set(ids)) == 40


def test_a_request_that_is_here_already(llama: PreTrainedModel) -> None:
    row = rows()[0]
    with hf_cb.continuous_batching(llama, **POOL) as engine, Gate(engine) as gate:
        request = inside.request(engine, row.prompt, max_new_tokens=len(row.tokens))
        first, second = inside.intake(engine).submit([request, request])
        with pytest.raises(InvalidArgumentError, match="again"):
            second.result()
        gate.let(float("inf"))
        assert first.result().tokens == row.tokens
        assert ask(llama, row) == row.tokens
