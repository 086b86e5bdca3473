"""Pieces of an answer: whole characters, nothing of a stop string, every token with one of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hf_cb.handle import GenerationHandle, OutputQueue
from hf_cb.request import FinishReason, Request
from hf_cb.server.reading import Piece, Reading
from hf_cb.server.stops import StopStrings
from hf_cb.text import TextDecoder

pytestmark = pytest.mark.timeout(20)

TEXT = "so 👩‍👩‍👧‍👦 and\n\n世界 STOP here"


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


class Nobody:
    """Whom no handle has anything to say to, but that it is cancelled."""

    def __init__(self) -> None:
        self.aborted: list[int] = []

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)

    def forget(self, request_id: int) -> None: ...

    def refuse_own_thread(self, name: str) -> None: ...


def read(
    tokenizer: Any, stops: list[str], at_once: int, by_token: bool, text: str = TEXT
) -> tuple[list[Piece], Reading, Nobody]:
    """The pieces of `text` for a reader to whom so many tokens come at a time."""
    tokens = tokenizer(text)["input_ids"]
    queue, nobody = OutputQueue(Request((1,), len(tokens))), Nobody()
    reading = Reading(GenerationHandle(queue, nobody), TextDecoder(tokenizer), StopStrings(stops), by_token)

    async def feed() -> None:
        for i, token in enumerate(tokens, 1):
            queue.put((token,))
            if i % at_once == 0:
                for _ in range(5):  # until the reader waits for more
                    await asyncio.sleep(0)
        queue.close(FinishReason.LENGTH)

    async def main() -> list[Piece]:
        feeding = asyncio.ensure_future(feed())
        pieces = [piece async for piece in reading.pieces()]
        await feeding
        return pieces

    return asyncio.run(main()), reading, nobody


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
@pytest.mark.parametrize("by_token", [True, False])
def test_the_whole_text(tokenizer: Any, at_once: int, by_token: bool) -> None:
    pieces, reading, nobody = read(tokenizer, [], at_once, by_token)
    assert "".join(piece.text for piece in pieces) == TEXT
    assert not any("\ufffd" in piece.text for piece in pieces)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    ends = [0, *(piece.end for piece in pieces)]
    assert [piece.first for piece in pieces] == ends[:-1]
    assert ends[-1] == reading.num_tokens == len(tokenizer(TEXT)["input_ids"])
    if by_token:
        assert ends == [*range(ends[-1] + 1), ends[-1]]
        assert TEXT[pieces[0].offset :] == TEXT
    assert nobody.aborted == []


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize(
    ("stops", "left"),
    [
        (["STOP"], TEXT[: TEXT.index("STOP")]),
        (["\n\n", "STOP"], TEXT[: TEXT.index("\n\n")]),
        (["TOP h", "never"], TEXT[: TEXT.index("TOP")]),
        (["界"], TEXT[: TEXT.index("界")]),
        (["👩"], "so "),
        (["s"], ""),
        (["here"], TEXT[:-4]),
        (["here!", "STOP!"], TEXT),
    ],
)
def test_stop_strings(tokenizer: Any, stops: list[str], left: str, at_once: int, by_token: bool) -> None:
    """However late the reader comes, the answer and its tokens are the same."""
    pieces, reading, nobody = read(tokenizer, stops, at_once, by_token)
    assert "".join(piece.text for piece in pieces) == left
    stopped = left != TEXT
    assert pieces[-1].finish_reason == ("stop" if stopped else "length")
    tokens = tokenizer(TEXT)["input_ids"]
    text_with_stop = left + next((stop for stop in stops if TEXT[len(left) :].startswith(stop)), "")
    needed = next(n for n in range(len(tokens) + 1) if tokenizer.decode(tokens[:n]).startswith(text_with_stop))
    assert reading.num_tokens == needed
    if at_once == 1:
        assert len(nobody.aborted) == stopped


def test_nothing_is_held_longer_than_it_may_be_a_stop(tokenizer: Any) -> None:
    pieces, _, _ = read(tokenizer, ["STOPPED"], 1, False)
    texts = [piece.text for piece in pieces if piece.text]
    assert TEXT.startswith("".join(texts[:-1]))
    assert any(text.endswith(" ") or text.startswith(" and") for text in texts)


def test_held() -> None:
    stops, none = StopStrings(["abab", "xy"]), StopStrings([])
    held = {"": 0, "a": 1, "zab": 2, "aba": 3, "abc": 0, "x": 1, "ax": 1, "abab": 2, "ababa": 3}
    assert {text: stops.held(text) for text in held} == held
    assert (stops.find("cxyabab"), stops.find("xyab", 1), none.find("a"), none.held("a")) == (1, None, None, 0)
