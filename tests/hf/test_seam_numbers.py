"""Numbers of odd kinds that transformers takes and the engine computes with: plain generate's tokens, or its error."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import seam
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import hf_cb

PROMPT, OTHER = (row[None] for row in seam.prompts(6, 17))
END = 40


def until(length: Any) -> dict[str, Any]:
    return {"max_new_tokens": 30, "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(length)])}


def changed(processor: Any, **values: Any) -> dict[str, Any]:
    """With a processor whose settings were changed after it had checked them."""
    vars(processor).update(values)
    return {"logits_processor": LogitsProcessorList([processor])}


ENDS = {"eos_token_id": END, "pad_token_id": 0}
ENDS_SOON = {"eos_token_id": list(range(1, 112, 2)), "pad_token_id": 0}
SERVED: dict[str, dict[str, Any]] = {
    "max_new_tokens 7.5": {"max_new_tokens": 7.5},
    "max_length 13.5": {"max_length": 13.5},
    "max_new_tokens 0.5": {"max_new_tokens": 0.5},
    "max_new_tokens of numpy": {"max_new_tokens": np.int64(7)},
    "max_new_tokens of numpy, a fraction": {"max_new_tokens": np.float32(7.5)},
    "max_new_tokens of torch": {"max_new_tokens": torch.tensor(7)},
    "max_new_tokens of torch, a fraction": {"max_new_tokens": torch.tensor(7.5)},
    "max_new_tokens 15 / 2": {"max_new_tokens": Fraction(15, 2)},
    "max_new_tokens True": {"max_new_tokens": True},
    "criterion 13.5": until(13.5),
    "criterion of torch": until(torch.tensor(13.5)),
    "criterion -inf": until(-math.inf),
    "num_beams of numpy": {"num_beams": np.int64(2)},
    "length_penalty nan": {"num_beams": 2, "length_penalty": math.nan},
    "length_penalty of torch": {"num_beams": 2, "length_penalty": torch.tensor(1.5)},
    "no end": {"eos_token_id": -1, "pad_token_id": 0, "min_new_tokens": 3},
    "repetition_penalty of numpy": {"repetition_penalty": np.float64(1.3)},
    "temperature of numpy": {"do_sample": True, "temperature": np.float64(0.7)},
    "top_p 1": {"do_sample": True, "top_p": 1},
    "min_p 1": {"do_sample": True, "min_p": 1},
    "do_sample 1": {"do_sample": 1, "top_k": 3},
}
NATIVE: dict[str, dict[str, Any]] = {
    "no limit": {**ENDS_SOON, "max_new_tokens": math.nan},
    "no limit on the length": {**ENDS_SOON, "max_length": math.inf},
    "num_return_sequences": {"num_return_sequences": 1.0},
    "suppress_tokens": {"suppress_tokens": [END + 0.5]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [float(END)]},
    "repetition_penalty": {"repetition_penalty": math.inf},
    "option repetition_penalty": changed(RepetitionPenaltyLogitsProcessor(1.3), penalty=torch.tensor(1.3)),
    "min_new_tokens": {**ENDS, **changed(MinLengthLogitsProcessor(9, torch.tensor([END])), min_length=9.5)},
    "temperature": {"do_sample": True, "temperature": math.inf},
    "option temperature": {"do_sample": True, **changed(TemperatureLogitsWarper(0.7), temperature=-0.7)},
    "top_p": {"do_sample": True, "top_k": 0, **changed(TopPLogitsWarper(0.9), top_p=1.5)},
    "min_p": {"do_sample": True, "min_p": torch.tensor(0.1)},
}
RAISES: dict[str, dict[str, Any]] = {
    "max_new_tokens '7'": {"max_new_tokens": "7"},
    "max_new_tokens -1.5": {"max_new_tokens": -1.5},
    "max_new_tokens [7]": {"max_new_tokens": torch.tensor([7])},
    "beams of 7.5": {"num_beams": 2, "max_new_tokens": 7.5},
    "num_beams 2.0": {"num_beams": 2.0},
    "num_beams 0": {"num_beams": 0},
    "num_return_sequences 2.0": {"num_beams": 3, "num_return_sequences": 2.0},
    "length_penalty 'a'": {"num_beams": 2, "length_penalty": "a"},
    "min_length 9.5": {**ENDS, "min_length": 9.5},
    "max_time 'a'": {"max_time": "a"},
    "top_k True": {"do_sample": True, "top_k": True},
    "top_k 5.5": {"do_sample": True, **changed(TopKLogitsWarper(5), top_k=5.5)},
}


@pytest.mark.parametrize("call", SERVED.values(), ids=SERVED)
def test_served(duo: seam.Duo, call: dict[str, Any]) -> None:
    length = {} if "max_length" in call else {"max_new_tokens": 7}
    duo.same(PROMPT, seed=3, **{"do_sample": False, **length, **call})


@pytest.mark.parametrize("option", NATIVE)
def test_native(duo: seam.Duo, option: str) -> None:
    length = {} if "max_length" in NATIVE[option] else {"max_new_tokens": 7}
    duo.same(PROMPT, seed=3, native=option, **{"do_sample": False, **length, **NATIVE[option]})


@pytest.mark.parametrize("call", RAISES.values(), ids=RAISES)
def test_errors_are_plain_generates(duo: seam.Duo, call: dict[str, Any]) -> None:
    other = duo.engine.submit(OTHER, max_new_tokens=40)
    kind, _ = duo.same_error(PROMPT, **{"do_sample": False, "max_new_tokens": 7, **call})
    assert issubclass(kind, (TypeError, ValueError, ZeroDivisionError))
    assert list(other.result().tokens) == duo.plain.generate(OTHER, max_new_tokens=40)[0, 17:].tolist()


@pytest.mark.parametrize("call", [{"max_new_tokens": math.nan}, {"max_length": math.inf}, until(math.nan)])
def test_what_would_never_end(duo: seam.Duo, call: dict[str, Any]) -> None:
    with pytest.raises(hf_cb.InvalidArgumentError, match="max_new_tokens, max_length: take a finite number"):
        duo.served.generate(PROMPT, do_sample=False, **call)
    duo.same(PROMPT, do_sample=False, max_new_tokens=4)
