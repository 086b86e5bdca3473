"""Criteria made from a tokenizer are shared by the calls that want the same one."""

from __future__ import annotations

import gc
import weakref

import pytest
from seam import word_tokenizer

from hf_cb.hf.calls.tokenizing import stop_string_criterion


def test_calls_that_want_the_same_share_one() -> None:
    tokenizer = word_tokenizer()
    first = stop_string_criterion(tokenizer, "w5")
    assert stop_string_criterion(tokenizer, ["w5"]) is first
    assert stop_string_criterion(tokenizer, ["w5", "w6"]) is not first
    assert stop_string_criterion(word_tokenizer(), "w5") is not first


def test_a_vocabulary_that_grows() -> None:
    tokenizer = word_tokenizer()
    first = stop_string_criterion(tokenizer, "w5")
    tokenizer.add_tokens(["xw5"])
    assert stop_string_criterion(tokenizer, "w5") is not first


def test_few_are_kept_and_none_keeps_a_tokenizer() -> None:
    tokenizer = word_tokenizer()
    first = stop_string_criterion(tokenizer, "w1")
    for i in range(2, 12):
        stop_string_criterion(tokenizer, f"w{i}")
    assert stop_string_criterion(tokenizer, "w1") is not first
    gone = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert gone() is None


def test_strings_of_no_token_are_transformers_error() -> None:
    with pytest.raises(ValueError, match="unable to identify tokens"):
        stop_string_criterion(word_tokenizer(), "\N{SNOWMAN}")
