"""What a token stands for, for each kind of tokenizer, and figures that JSON has."""

from __future__ import annotations

import math
from typing import Any

import pytest
import test_text

from hf_cb.request import TokenLogprobs
from hf_cb.server.logprobs import TokenTexts

TEXT = "so 👩‍👩 世界 नमस्ते, end"


@pytest.mark.parametrize("make", [test_text.byte_level, test_text.byte_fallback], ids=["byte level", "byte fallback"])
def test_the_bytes_of_the_tokens_are_the_texts(make: Any) -> None:
    tokenizer = make()
    texts, tokens = TokenTexts(tokenizer), tokenizer(TEXT)["input_ids"]
    assert b"".join(map(texts.bytes_of, tokens)).decode().strip() == TEXT
    shown = [texts.text_of(token) for token in tokens]
    assert any(text.startswith("bytes:\\x") for text in shown)
    assert not any("\ufffd" in text for text in shown)
    assert texts.text_of(tokenizer.eos_token_id) == "</s>"


def test_offsets_are_those_of_whole_characters() -> None:
    tokenizer = test_text.byte_level()
    tokens = tokenizer(TEXT)["input_ids"]
    found = TokenTexts(tokenizer).completion([*tokens, tokenizer.eos_token_id], [TokenLogprobs(-1.0)] * (len(tokens) + 1), 7)
    assert found["text_offset"][0] == 7
    for i, offset in enumerate(found["text_offset"]):
        assert TEXT[: offset - 7] == tokenizer.decode(tokens[:i]).rstrip("\ufffd")


@pytest.mark.parametrize("logprob", [-math.inf, math.nan])
def test_what_json_has_no_figure_for(logprob: float) -> None:
    texts, found = TokenTexts(test_text.byte_level()), TokenLogprobs(logprob, (5, 6), (-0.5, logprob))
    (token,) = texts.chat([5], [found])["content"]
    assert token["logprob"] == token["top_logprobs"][1]["logprob"] == -9999.0
    assert texts.completion([5], [found], 0)["token_logprobs"] == [-9999.0]
    assert texts.completion([5], [None], 0)["top_logprobs"] == [None]
