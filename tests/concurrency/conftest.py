"""The model of the tests in this folder."""

from __future__ import annotations

import pytest
import serving
from transformers import PreTrainedModel


@pytest.fixture
def llama() -> PreTrainedModel:
    """A sensitive tiny Llama, float32, of the test's own, with positions for LONG tokens."""
    return serving.tiny_llama()
