"""Calls that the engine does not serve: plain generate answers, exactly, and the reason is counted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import models
import pytest
import seam
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import MinNewTokensLengthLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

import hf_cb

NEW = 8
PROMPT = seam.prompts(6)[0][None]
BATCH = seam.left_padded(seam.prompts(6, 9, 3))


@pytest.fixture(scope="module")
def duo() -> Iterator[seam.Duo]:
    with seam.duo() as made:
        yield made


class Forbid(LogitsProcessor):
    """Never the most probable token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, scores.argmax(-1, keepdim=True), -torch.inf)


class StopAtMultiple(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 4 == 0


def backwards(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """A decoding function of the caller's own."""
    return input_ids.flip(1)


CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "beams and a criterion": ("criteria for several prompts", {"num_beams": 3, "max_time": 1000.0}),
    "beams and a processor": (
        "Forbid for several rows",
        {"num_beams": 3, "logits_processor": LogitsProcessorList([Forbid()])},
    ),
    "hidden states": ("output_hidden_states", {"output_hidden_states": True, "return_dict_in_generate": True}),
    "guidance": ("UnbatchedClassifierFreeGuidance", {"guidance_scale": 1.5}),
    "processor": ("Forbid for several rows", {"logits_processor": LogitsProcessorList([Forbid()])}),
    "criterion": (
        "StopAtMultiple for several rows",
        {"stopping_criteria": StoppingCriteriaList([StopAtMultiple()]), "eos_token_id": 7, "pad_token_id": 0},
    ),
    "criterion without an end": (
        "StopAtMultiple for several rows",
        {"stopping_criteria": StoppingCriteriaList([StopAtMultiple()]), "pad_token_id": 0},
    ),
    "own decoding": ("custom_generate", {"custom_generate": backwards}),
    "prompt lookup": ("assisted_generation", {"prompt_lookup_num_tokens": 2}),
}
ONE_ROW = ("prompt lookup",)


@pytest.mark.parametrize(("reason", "call"), CALLS.values(), ids=CALLS)
def test_same_result(duo: seam.Duo, request: pytest.FixtureRequest, reason: str, call: dict[str, Any]) -> None:
    inputs = {"input_ids": PROMPT} if request.node.callspec.id in ONE_ROW else BATCH
    duo.same(**inputs, max_new_tokens=NEW, seed=1, native=reason, **call)


def test_the_options_above_change_something(duo: seam.Duo) -> None:
    usual = duo.same(**BATCH, max_new_tokens=NEW)
    for name in ("guidance", "processor", "criterion", "criterion without an end"):
        assert not torch.equal(duo.plain.generate(**BATCH, max_new_tokens=NEW, **CALLS[name][1]), usual), name


def test_assistant(duo: seam.Duo) -> None:
    duo.same(PROMPT, max_new_tokens=NEW, assistant_model=models.tiny("llama"), native="assistant_model")


def test_embeddings_instead_of_ids(duo: seam.Duo) -> None:
    embeddings = duo.plain.get_input_embeddings()(PROMPT).detach()
    assert duo.same(inputs_embeds=embeddings, max_new_tokens=NEW, native="inputs_embeds").shape == (1, NEW)


def test_positions(duo: seam.Duo) -> None:
    spread = torch.arange(PROMPT.shape[1])[None] * 3
    usual = duo.same(PROMPT, max_new_tokens=NEW)
    assert not torch.equal(duo.same(PROMPT, position_ids=spread, max_new_tokens=NEW, native="position_ids"), usual)


def test_a_cache_of_the_callers(duo: seam.Duo) -> None:
    def cache(model: Any) -> Any:
        with torch.no_grad():
            return model(PROMPT[:, :-1], use_cache=True).cache

    want = duo.plain.generate(PROMPT, cache=cache(duo.plain), max_new_tokens=NEW)
    with duo.native_calls() as reasons:
        got = duo.served.generate(PROMPT, cache=cache(duo.plain), max_new_tokens=NEW)
    assert torch.equal(got, want)
    assert reasons == ["argument cache"]


def test_training_mode() -> None:
    with seam.duo() as duo:
        for model in (duo.plain, duo.served):
            model.train()
        duo.same(PROMPT, max_new_tokens=NEW, native="training mode")
        assert duo.served.training
        duo.served.eval()
        duo.plain.eval()
        duo.same(PROMPT, max_new_tokens=NEW)


def test_autocast(duo: seam.Duo) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        duo.same(PROMPT, max_new_tokens=NEW, native="autocast")


def test_options_of_the_models_generation_config() -> None:
    with seam.duo() as duo:
        for model in (duo.plain, duo.served):
            model.generation_config.num_beams = 2
        duo.same(PROMPT, max_new_tokens=NEW)
        for model in (duo.plain, duo.served):
            model.generation_config.prompt_lookup_num_tokens = 2
        duo.same(PROMPT, max_new_tokens=NEW, num_beams=1, native="assisted_generation")
        for model in (duo.plain, duo.served):
            model.generation_config.prompt_lookup_num_tokens = None
        duo.same(PROMPT, max_new_tokens=NEW, num_beams=1)


def test_beyond_the_models_positions() -> None:
    with seam.duo(max_position_embeddings=128) as duo:
        prompt = seam.prompts(125)[0][None]
        assert duo.same(prompt, max_new_tokens=3).shape[1] == 128
        assert duo.same(prompt, max_new_tokens=6, native="128 positions").shape[1] == 131


def test_criteria_and_processors_of_known_kinds_are_served(duo: seam.Duo) -> None:
    tokens = duo.same(PROMPT, max_new_tokens=NEW)[0, 6:].tolist()
    for criteria in (
        [MaxLengthCriteria(9)],
        [MaxLengthCriteria(12), MaxLengthCriteria(10)],
        [MaxLengthCriteria(3)],
        [EosTokenCriteria(tokens[4]), EosTokenCriteria(tokens[2])],
    ):
        call = {"stopping_criteria": StoppingCriteriaList(criteria), "eos_token_id": 2, "pad_token_id": 0}
        duo.same(PROMPT, max_new_tokens=NEW, **call)
    for reach in (0, 3, 6, 9):
        least = MinNewTokensLengthLogitsProcessor(reach, 4, tokens[0])
        call = {"logits_processor": LogitsProcessorList([least]), "eos_token_id": tokens[0], "pad_token_id": 0}
        duo.same(PROMPT, max_new_tokens=NEW, **call)
    other = MinNewTokensLengthLogitsProcessor(6, 4, tokens[0])
    duo.same(PROMPT, max_new_tokens=NEW, logits_processor=LogitsProcessorList([other]))


def test_a_call_leaves_the_callers_lists_alone(duo: seam.Duo) -> None:
    processors, criteria = LogitsProcessorList([Forbid()]), StoppingCriteriaList([StopAtMultiple()])
    before = copy.copy(processors), copy.copy(criteria)
    duo.served.generate(PROMPT, max_new_tokens=NEW, logits_processor=processors, stopping_criteria=criteria, pad_token_id=0)
    assert (processors, criteria) == before


def test_each_call_is_counted_under_its_reason() -> None:
    with seam.duo() as duo:
        for _ in range(3):
            duo.served.generate(PROMPT, max_new_tokens=2, guidance_scale=1.5)
        duo.served.generate(PROMPT, max_new_tokens=2, prompt_lookup_num_tokens=2)
        duo.served.generate(PROMPT, max_new_tokens=2)
        assert duo.engine.stats().native_calls == {
            "logits processor UnbatchedClassifierFreeGuidanceLogitsProcessor calls the model itself": 3,
            "generation mode assisted_generation": 1,
        }
        assert duo.engine.stats().output_tokens == 2


@pytest.mark.parametrize(
    ("reason", "call"),
    [
        ("generation mode assisted_generation", {"prompt_lookup_num_tokens": 2}),
        ("UnbatchedClassifierFreeGuidanceLogitsProcessor", {"guidance_scale": 1.5}),
        ("position_ids other than", {"position_ids": torch.arange(1, 7)[None]}),
        ("option output_attentions", {"output_attentions": True, "return_dict_in_generate": True}),
    ],
)
def test_fallback_error(reason: str, call: dict[str, Any]) -> None:
    with seam.duo(options={"fallback": "error"}) as duo:
        with pytest.raises(hf_cb.UnsupportedCallError) as caught:
            duo.served.generate(PROMPT, max_new_tokens=NEW, **call)
        assert reason in str(caught.value)
        assert duo.engine.stats().native_calls == {}
        duo.same(PROMPT, max_new_tokens=NEW)


def test_fallback_error_puts_nothing_into_the_streamer() -> None:
    with seam.duo(options={"fallback": "error"}) as duo:
        recorder = seam.Recorder()
        with pytest.raises(hf_cb.UnsupportedCallError):
            duo.served.generate(PROMPT, max_new_tokens=NEW, guidance_scale=1.5, streamer=recorder)
        assert recorder.events == []


def _refusals() -> dict[str, Callable[[Any], Any]]:
    return {
        "max_new_tokens": lambda model: model.generate(PROMPT, max_new_tokens=-1),
        "max_length": lambda model: model.generate(PROMPT, max_length=4),
        "typo": lambda model: model.generate(PROMPT, max_new_token=4),
        "temperature": lambda model: model.generate(PROMPT, max_new_tokens=4, do_sample=True, temperature=-1.0),
        "top_p": lambda model: model.generate(PROMPT, max_new_tokens=4, do_sample=True, top_p=-2.0),
        "synced_gpus": lambda model: model.generate(PROMPT, max_new_tokens=4, synced_gpus=True),
        "mask": lambda model: model.generate(PROMPT, max_new_tokens=4, attention_mask=torch.ones(1, 1, 6, 6)),
        "cache": lambda model: model.generate(PROMPT, max_new_tokens=4, cache_implementation="none of these"),
        "list": lambda model: model.generate([[1, 2, 3]], max_new_tokens=4),
        "processors": lambda model: model.generate(PROMPT, max_new_tokens=4, logits_processor=5),
    }


@pytest.mark.parametrize("refused", _refusals().values(), ids=_refusals())
def test_transformers_own_refusals(duo: seam.Duo, refused: Callable[[Any], Any]) -> None:
    caught = []
    for model in (duo.plain, duo.served):
        with pytest.raises(Exception) as info:
            refused(model)
        caught.append((info.type, str(info.value)))
    assert caught[0] == caught[1]


def test_generation_parameters_in_the_models_config_are_refused() -> None:
    with seam.duo() as duo:
        for model in (duo.plain, duo.served):
            model.config.max_length = 33
            with pytest.raises(ValueError, match="pretrained model configuration"):
                model.generate(PROMPT, max_new_tokens=2)
