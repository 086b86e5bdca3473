"""A thread that pauses the engine and goes on using the model."""

from __future__ import annotations

import pytest
import torch
from serving import ask, rows
from transformers import PreTrainedModel

import hf_cb
from hf_cb import Engine

pytestmark = pytest.mark.timeout(20)


def test_its_own_calls_run_natively(llama: PreTrainedModel, engine: Engine) -> None:
    with engine.pause():
        assert ask(llama, rows()[3]) == rows()[3].tokens
        assert list(engine.stats().native_calls) == ["this thread has paused the engine"]
    assert ask(llama, rows()[3]) == rows()[3].tokens
    assert sum(engine.stats().native_calls.values()) == 1


def test_a_request_to_a_model_that_changed_inside_is_refused(llama: PreTrainedModel, engine: Engine) -> None:
    assert ask(llama, rows()[3]) == rows()[3].tokens
    with engine.pause():
        llama.lm_head.weight = torch.nn.Parameter(llama.lm_head.weight.detach().clone())
        with pytest.raises(hf_cb.UnsupportedCallError, match=r"^pause: the model has changed"):
            engine.submit(rows()[3].prompt)
    assert ask(llama, rows()[3]) == rows()[3].tokens
