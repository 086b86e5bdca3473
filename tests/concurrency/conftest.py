"""The model of the tests in this folder, and an engine behind it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import serving
from transformers import PreTrainedModel

import hf_cb


@pytest.fixture
def llama() -> PreTrainedModel:
    """A sensitive tiny Llama, float32, of the test's own, with positions for LONG tokens."""
    serving.rows()  # made here, not while a test waits for what needs them
    serving.long_row()
    return serving.tiny_llama()


@pytest.fixture
def engine(llama: PreTrainedModel) -> Iterator[hf_cb.Engine]:
    """It serves `llama`, with room for all, until the test ends."""
    with hf_cb.continuous_batching(llama, **serving.SMALL) as engine:
        yield engine


@pytest.fixture
def gate(engine: hf_cb.Engine) -> Iterator[serving.Gate]:
    """Before the steps of `engine`; shut until the test opens it, or ends."""
    with serving.Gate(engine) as gate:
        yield gate
