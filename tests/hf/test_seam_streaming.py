"""A streamer gets from the engine, value for value, what it gets from plain generate."""

from __future__ import annotations

import threading
from typing import Any

import models
import pytest
import seam
import torch
from transformers import TextIteratorStreamer, TextStreamer

NEW = 16


def streamed(duo: seam.Duo, native: str | None = None, seed: int | None = None, **call: Any) -> list[Any]:
    """The events that a recorder gets from both."""
    want, got = seam.Recorder(), seam.Recorder()
    with seam.seeded(seed):
        plain = duo.plain.generate(**call, streamer=want)
    with duo.native_calls() as reasons:
        served = duo.served.generate(**call, streamer=got, **({} if seed is None else {"seed": seed}))
    assert [native in reason for reason in reasons] == ([] if native is None else [True])
    assert torch.equal(served, plain)
    assert got.events == want.events
    return got.events


def test_one_row(duo: seam.Duo) -> None:
    call = {"input_ids": seam.PROMPT, "max_new_tokens": NEW}
    events = streamed(duo, **call)
    assert len(events) == NEW + 2
    assert events[0][2] == seam.PROMPT.tolist()
    assert streamed(duo, **call, do_sample=True, seed=3) != events
    assert len(streamed(duo, **call, eos_token_id=list(range(3, 112, 5)))) < NEW + 2


def test_rows_that_end_at_different_steps(duo: seam.Duo) -> None:
    batch = seam.left_padded(seam.prompts(5, 9, 2))
    ends, pad = list(range(3, models.VOCAB, 9)), 1
    events = streamed(duo, **batch, max_new_tokens=NEW, eos_token_id=ends, pad_token_id=pad)
    ended = [sum(token == pad for token in values) for _, _, values in events[1:-1]]
    assert len(set(ended)) > 1


@pytest.mark.parametrize(
    ("native", "option"),
    [("Guidance", {"guidance_scale": 1.3}), ("position_ids other than", {"position_ids": torch.arange(1, 7)[None]})],
)
def test_a_native_call_puts_the_prompt_once(duo: seam.Duo, native: str, option: dict[str, Any]) -> None:
    prompt = seam.PROMPT
    events = streamed(duo, native, input_ids=prompt, max_new_tokens=4, **option)
    assert [event for event in events if event != "end" and event[2] == prompt.tolist()] == events[:1]


def test_text_streamer(duo: seam.Duo, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, texts = seam.word_tokenizer(), []
    for model in (duo.plain, duo.served):
        out = model.generate(seam.prompts(4)[0][None], max_new_tokens=NEW, streamer=TextStreamer(tokenizer))
        texts.append(capsys.readouterr().out)
        assert texts[-1].split() == tokenizer.decode(out[0]).split()
    assert texts[0] == texts[1]


def test_text_iterator_streamer(duo: seam.Duo) -> None:
    tokenizer, pieces = seam.word_tokenizer(), []
    for model in (duo.plain, duo.served):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
        call = {"inputs": seam.prompts(4)[0][None], "max_new_tokens": NEW, "streamer": streamer}
        thread = threading.Thread(target=model.generate, kwargs=call)
        thread.start()
        pieces.append(list(streamer))
        thread.join()
    assert pieces[0] == pieces[1]
    assert len("".join(pieces[1]).split()) == NEW


class Broken(seam.Recorder):
    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.events) == 3:
            raise ArithmeticError("the streamer's own fault")


def test_a_streamers_error_is_its_callers(duo: seam.Duo) -> None:
    neighbour = duo.engine.submit([5, 6, 7], max_new_tokens=60)
    for model in (duo.plain, duo.served):
        streamer = Broken()
        with pytest.raises(ArithmeticError, match="the streamer's own fault"):
            model.generate(seam.prompts(4)[0][None], max_new_tokens=200, streamer=streamer)
        assert len(streamer.events) == 3
    assert len(neighbour.result(timeout=20).tokens) == 60
