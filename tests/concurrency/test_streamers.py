"""Streamers run on their caller's thread: what one does wrong, or slowly, is its own affair."""

from __future__ import annotations

import threading

import inside
import pytest
from serving import LONG, SMALL, Recorder, Row, ask, long_row, rows, together, wait_until
from transformers import PreTrainedModel, TextIteratorStreamer

import hf_cb
from hf_cb import Engine, FinishReason

pytestmark = pytest.mark.timeout(20)


class Tokenizer:
    """A word for each token."""

    def decode(self, tokens: list[int], **options: object) -> str:
        return "".join(f"<{int(token)}> " for token in tokens)


def test_many_at_once(llama: PreTrainedModel, engine: Engine) -> None:
    recorders = [Recorder() for _ in rows()]
    calls = [lambda row=row, r=r: (ask(llama, row, streamer=r), r) for row, r in zip(rows(), recorders, strict=True)]
    assert together(calls) == [(row.tokens, r) for row, r in zip(rows(), recorders, strict=True)]
    for recorder, row in zip(recorders, rows(), strict=True):
        recorder.assert_whole(row)
    assert len(set.union(*(recorder.threads for recorder in recorders))) == len(rows())  # each on its caller's
    assert engine.stats().native_calls == {}


def test_one_that_raises(llama: PreTrainedModel, engine: Engine) -> None:
    def fail() -> None:
        raise error

    error, others = ValueError("my streamer"), rows()[:8]
    recorder = Recorder(fail)
    failed, *right = together(
        [
            lambda: llama.generate(long_row().ids, max_new_tokens=LONG, streamer=recorder),
            *(lambda row=row: ask(llama, row) for row in others),
        ]
    )
    assert failed is error
    assert right == [row.tokens for row in others]
    assert recorder.puts[1:] == [[token] for token in long_row().tokens[:3]]
    assert recorder.ended == 0
    wait_until(lambda: engine.stats().finished == {FinishReason.LENGTH: 8, FinishReason.CANCELLED: 1})
    assert ask(llama, rows()[10]) == rows()[10].tokens


def test_one_that_dawdles(llama: PreTrainedModel) -> None:
    others_done = threading.Event()
    recorder = Recorder(at_third=others_done.wait)
    with hf_cb.continuous_batching(llama, **SMALL):

        def ask_others() -> list[tuple[int, ...]]:
            results = [ask(llama, row) for row in rows()[:4]]
            others_done.set()
            return results

        slow, others = together([lambda: ask(llama, rows()[10], streamer=recorder), ask_others])
        assert slow == rows()[10].tokens
        assert others == [row.tokens for row in rows()[:4]]
        recorder.assert_whole(rows()[10])


def test_text_iterators_read_in_other_threads(llama: PreTrainedModel, engine: Engine) -> None:

    def read(row: Row) -> str:
        streamer = TextIteratorStreamer(Tokenizer(), skip_prompt=True, timeout=10)
        thread = threading.Thread(target=ask, args=(llama, row), kwargs={"streamer": streamer}, daemon=True)
        thread.start()
        text = "".join(streamer)
        thread.join()
        return text

    texts = together([lambda row=row: read(row) for row in rows()])
    assert texts == [Tokenizer().decode(list(row.tokens)) for row in rows()]
    assert engine.stats().native_calls == {}


def test_a_failing_request_ends_its_stream(llama: PreTrainedModel, engine: Engine) -> None:
    streamer = TextIteratorStreamer(Tokenizer(), skip_prompt=True)  # type: ignore[arg-type]
    runner = inside.runner(engine)
    execute, steps = runner.execute, iter(range(100))

    def fail_at_the_third(output: object) -> object:
        if next(steps) == 2:
            raise ValueError("it broke")
        return execute(output)

    runner.execute = fail_at_the_third

    def call() -> None:
        with pytest.raises(hf_cb.RequestFailedError, match="it broke"):
            ask(llama, rows()[0], streamer=streamer)

    text, _ = together([lambda: "".join(streamer), call])
    assert text.split() == [f"<{token}>" for token in rows()[0].tokens[:2]]
