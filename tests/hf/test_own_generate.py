"""A model that carries a `generate` of its own in its attributes: that one answers, and it is there again afterwards."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import seam
import torch
from transformers import PreTrainedModel

import hf_cb

PROMPT = seam.prompts(6)[0][None]


def twice(model: PreTrainedModel) -> Any:
    """With a signature of its own."""

    def generate(inputs: torch.Tensor, times: int = 2, *, shift: int = 0) -> torch.Tensor:
        return inputs.repeat(1, times) + shift

    return generate


def shouting(model: PreTrainedModel) -> Any:
    """A wrapper that passes everything on."""
    inner = model.generate

    def generate(*args: Any, **kwargs: Any) -> torch.Tensor:
        return inner(*args, **kwargs) * -1

    return generate


def logging(model: PreTrainedModel) -> Any:
    """The same, made with functools."""
    return functools.wraps(model.generate)(shouting(model))


CALLS = (
    (twice, (PROMPT,), {}),
    (twice, (PROMPT, 3), {"shift": 1}),
    (shouting, (PROMPT,), {"max_new_tokens": 3}),
    (shouting, (PROMPT, None), {"max_new_tokens": 3}),
    (shouting, (), {"inputs": PROMPT, "max_new_tokens": 3}),
    (logging, (PROMPT,), {"max_new_tokens": 3}),
)


@pytest.mark.parametrize("backend", ["continuous_batching", "serialized"])
@pytest.mark.parametrize(("made", "args", "kwargs"), CALLS)
def test_it_answers_and_comes_back(llama: PreTrainedModel, backend: str, made: Any, args: Any, kwargs: Any) -> None:
    llama.generate = own = made(llama)
    want = own(*args, **kwargs)
    hf_cb.install(llama, backend=backend)
    assert torch.equal(llama.generate(*args, **kwargs), want)
    if backend == "continuous_batching":
        assert hf_cb.get_engine(llama).stats().native_calls == {"the model has a generate of its own": 1}
    hf_cb.uninstall(llama)
    assert vars(llama)["generate"] is own
