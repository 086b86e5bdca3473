"""torch's default dtype and default device are the user's: tensors of our own name theirs."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import models
import pytest
import seam
import torch

import hf_cb
from hf_cb.runtime import draws

# What torch makes from nothing, in its default dtype or on its default device.
FACTORIES = (
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones"),
    *("rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
)
FILES = sorted(Path(hf_cb.__file__).parent.rglob("*.py"))


def unnamed(source: str) -> Iterator[str]:
    """Calls of torch's factories that leave their dtype or their device to the defaults."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in FACTORIES:
                if not {"dtype", "device"} <= {keyword.arg for keyword in node.keywords}:
                    yield f"line {node.lineno}: {ast.unparse(node)}"


def test_all_our_tensors_name_their_dtype_and_their_device() -> None:
    found = {path.name: list(unnamed(path.read_text())) for path in FILES}
    assert {name: calls for name, calls in found.items() if calls} == {}
    assert list(unnamed("torch.empty(3, device='cpu')")) == ["line 1: torch.empty(3, device='cpu')"]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


DEFAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
}


@pytest.fixture
def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found out once a process, about torch's random numbers, is found out in the test."""
    monkeypatch.setattr(draws, "_native_is_torchs", draws._native_is_torchs.__wrapped__)


CALLS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 9, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.3},
    "scores": {"do_sample": False, "return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "beams": {"do_sample": False, "num_beams": 3},
    "beams that sample": {"do_sample": True, "num_beams": 3},
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.usefixtures("as_in_a_new_process")
def test_every_kind_of_call(name: str, when: str) -> None:
    prompts = [row[None] for row in seam.prompts(6, 11)]
    plain, served = models.tiny("llama"), models.tiny("llama")
    with contextlib.ExitStack() as stack:
        if when == "before":
            stack.enter_context(DEFAULTS[name]())
        duo = seam.Duo(plain, served, stack.enter_context(hf_cb.continuous_batching(served)))
        if when == "after":
            stack.enter_context(DEFAULTS[name]())
        assert duo.engine.unsupported_reason is None
        assert duo.engine.stats().packed_bytes > 0
        for kind, call in CALLS.items():
            if not (name == "meta" and "beams" in kind):  # there plain generate itself takes the default device
                for prompt in prompts:
                    duo.same(prompt, seed=3, max_new_tokens=5, **call)
        result = duo.engine.generate_batch([prompts[0]], max_new_tokens=4, logprobs=2, prompt_logprobs=1)[0]
        assert list(result.tokens) == duo.plain.generate(prompts[0], do_sample=False, max_new_tokens=4)[0, 6:].tolist()
        if name == "meta":
            assert duo.served.generate(prompts[0], num_beams=2, max_new_tokens=3).shape == (1, 9)
