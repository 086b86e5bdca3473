"""Calls that the engine does not serve: plain generate answers, exactly, and the reason is counted."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import models
import pytest
import seam
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList, TextStreamer
from transformers.generation.logits_process import MinNewTokensLengthLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerationMixin

import hf_cb

NEW = seam.NEW
PROMPT = seam.PROMPT
BATCH = seam.left_padded(seam.prompts(6, 9, 3))


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
    "an assistant": ("assistant_model", {"assistant_model": models.tiny("llama")}),
    "own decoding": ("custom_generate", {"custom_generate": backwards}),
    "prompt lookup": ("assisted_generation", {"prompt_lookup_num_tokens": 2}),
}
ONE_ROW = ("prompt lookup", "an assistant")


@pytest.mark.parametrize(("reason", "call"), CALLS.values(), ids=CALLS)
def test_same_result(duo: seam.Duo, request: pytest.FixtureRequest, reason: str, call: dict[str, Any]) -> None:
    inputs = {"input_ids": PROMPT} if request.node.callspec.id in ONE_ROW else BATCH
    duo.same(**inputs, max_new_tokens=NEW, seed=1, native=reason, **call)


def test_the_options_above_change_something(duo: seam.Duo) -> None:
    usual = duo.same(**BATCH, max_new_tokens=NEW)
    for name in ("guidance", "processor", "criterion", "criterion without an end"):
        assert not torch.equal(duo.plain.generate(**BATCH, max_new_tokens=NEW, **CALLS[name][1]), usual), name


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
    assert reasons == ["a cache that was looked into, or is none of a result's"]


def test_training_mode() -> None:
    with seam.duo() as duo:
        duo.both(lambda model: model.train())
        duo.same(PROMPT, max_new_tokens=NEW, native="training mode")
        assert duo.served.training
        duo.both(lambda model: model.eval())
        duo.same(PROMPT, max_new_tokens=NEW)


def test_autocast(duo: seam.Duo) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        duo.same(PROMPT, max_new_tokens=NEW, native="autocast")


def test_options_of_the_models_generation_config() -> None:
    with seam.duo() as duo:
        duo.both(lambda model: model.generation_config.update(num_beams=2))
        duo.same(PROMPT, max_new_tokens=NEW)
        duo.both(lambda model: model.generation_config.update(prompt_lookup_num_tokens=2))
        duo.same(PROMPT, max_new_tokens=NEW, num_beams=1, native="assisted_generation")
        duo.both(lambda model: model.generation_config.update(prompt_lookup_num_tokens=None))
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
        recorder = seam.Recorder()
        with pytest.raises(hf_cb.UnsupportedCallError, match=reason):
            duo.served.generate(PROMPT, max_new_tokens=NEW, streamer=recorder, **call)
        assert recorder.events == []
        assert duo.engine.stats().native_calls == {}
        duo.same(PROMPT, max_new_tokens=NEW)


TWO = torch.stack(seam.prompts(4, 4))
REFUSALS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "max_new_tokens": ((PROMPT,), {"max_new_tokens": -1}),
    "max_length": ((PROMPT,), {"max_length": 4, "max_new_tokens": None}),
    "max_new_token": ((PROMPT,), {"max_new_token": 4}),
    "temperature": ((PROMPT,), {"do_sample": True, "temperature": -1.0}),
    "top_p": ((PROMPT,), {"do_sample": True, "top_p": -2.0}),
    "synced_gpus": ((PROMPT,), {"synced_gpus": True}),
    "attention_mask": ((PROMPT,), {"attention_mask": torch.ones(1, 1, 6, 6)}),
    "cache_implementation": ((PROMPT,), {"cache_implementation": "none of these"}),
    "logits_processor": ((PROMPT,), {"logits_processor": 5}),
    "num_return_sequences": ((PROMPT,), {"num_return_sequences": 2}),
    "num_return_sequences of beams": ((PROMPT,), {"num_beams": 2, "num_return_sequences": 3}),
    "streamer of beams": ((TWO,), {"num_beams": 2, "streamer": seam.Recorder()}),
    "streamer of texts, two rows": ((TWO,), {"streamer": TextStreamer(seam.word_tokenizer())}),
    "a list": (([[1, 2, 3]],), {}),
    "inputs and input_ids": ((PROMPT,), {"input_ids": PROMPT}),
}


@pytest.mark.parametrize(("args", "options"), REFUSALS.values(), ids=REFUSALS)
def test_transformers_own_refusals(duo: seam.Duo, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    duo.same_error(*args, **{"max_new_tokens": 4, **options})


def test_generation_parameters_in_the_models_config_are_refused() -> None:
    with seam.duo() as duo:
        for model in (duo.plain, duo.served):
            model.config.max_length = 33
            with pytest.raises(ValueError, match="pretrained model configuration"):
                model.generate(PROMPT, max_new_tokens=2)


# -- what generate calls, and what sees it run --------------------------------------------------------------------------------


def reversed_sample(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    out = SAMPLE(self, input_ids, *args, **kwargs)
    return torch.cat([input_ids, out[:, input_ids.shape[1] :].flip(1)], 1)


def doubled_positions(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
    inputs = PREPARE(self, input_ids, **kwargs)
    return {**inputs, "position_ids": inputs["position_ids"] * 2}


def negated_logits(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
    outputs.logits.mul_(-1)
    return UPDATE(self, outputs, *args, **kwargs)


def loud_generate(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return GENERATE(self, *args, **kwargs) * -1


SAMPLE, PREPARE = GenerationMixin._sample, GenerationMixin.prepare_inputs_for_generation
UPDATE, GENERATE = GenerationMixin._update_model_kwargs_for_generation, GenerationMixin.generate
METHODS: dict[str, Any] = {
    "_sample": reversed_sample,
    "prepare_inputs_for_generation": doubled_positions,
    "_update_model_kwargs_for_generation": negated_logits,
    "generate": loud_generate,
}
PLACES = ("of the class", "on the class", "on the mixin", "of the model")


@pytest.mark.parametrize(("place", "installed_first"), [*((place, True) for place in PLACES), ("on the mixin", False)])
def test_methods_that_generate_calls(place: str, installed_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever replaces one gets it called, and whoever takes it away again is served again."""
    model = models.tiny("llama")
    own = model.__class__ = type("Own", (type(model),), {})  # patched alone
    if installed_first:
        hf_cb.install(model)
    for name, method in METHODS.items():
        if place == "of the model" and name in ("generate", "_sample"):
            continue  # generate takes those from the class, or is that itself
        method = functools.wraps(getattr(GenerationMixin, name))(method)  # which makes it look like transformers' own
        with monkeypatch.context() as patch:
            before = seam.plain(model)
            if place == "of the class":
                model.__class__ = type("Mine", (own,), {name: method})
            elif place == "of the model":
                patch.setitem(vars(model), name, types.MethodType(method, model))
            else:
                patch.setattr(own if place == "on the class" else GenerationMixin, name, method, raising=False)
            if not installed_first:
                hf_cb.install(model)
            engine, want = hf_cb.get_engine(model), seam.plain(model)
            assert not torch.equal(want, before), name
            assert torch.equal(seam.served(model), want)
            reason = f"{name} is not transformers' own"
            assert engine.stats().native_calls[reason] == 1
            patch.undo()
            model.__class__ = own
            assert torch.equal(seam.served(model), seam.plain(model))
            assert engine.stats().native_calls[reason] == 1
            if not installed_first:
                hf_cb.uninstall(model)
    if installed_first:
        hf_cb.uninstall(model)


def test_a_processor_that_the_class_adds_is_served() -> None:
    """The preamble calls what makes processors, and hands them on."""

    class Own(type(models.tiny("llama"))):
        def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
            return LogitsProcessorList([*super()._get_logits_processor(*args, **kwargs), Forbid()])

    model = models.tiny("llama")
    usual = seam.served(model)
    model.__class__ = Own
    with hf_cb.continuous_batching(model, fallback="error"):
        want = seam.plain(model)
        assert not torch.equal(want, usual)
        assert torch.equal(seam.served(model), want)


def tripled(module: Any, args: Any, output: Any = None) -> Any:
    """What a small linear layer gives, or is given."""
    if not isinstance(module, torch.nn.Linear) or module.in_features != 64:
        return None
    return (args[0] * 3,) if output is None else output * 3


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
@pytest.mark.parametrize("installed_first", [True, False])
def test_hooks_for_all_modules(kind: str, installed_first: bool) -> None:
    model = models.tiny("llama")
    usual = seam.served(model)
    if installed_first:
        hf_cb.install(model)
    handle = getattr(torch.nn.modules.module, f"register_module_{kind}")(tripled)
    try:
        engine = hf_cb.get_engine(model) if installed_first else hf_cb.install(model)
        want = seam.plain(model)
        assert not torch.equal(want, usual)
        assert torch.equal(seam.served(model), want)
        assert ["for all modules" in reason for reason in engine.stats().native_calls] == [True]
        with pytest.raises(hf_cb.UnsupportedModelError, match="for all modules"):
            engine.submit(PROMPT, max_new_tokens=NEW)
    finally:
        handle.remove()
    assert torch.equal(seam.served(model), usual)
    assert engine.submit(PROMPT, max_new_tokens=NEW).result().tokens == tuple(usual[0, 6:].tolist())
    assert sum(engine.stats().native_calls.values()) == 1
    hf_cb.uninstall(model)


class Doubled(TorchFunctionMode):
    """Every product of a linear layer, twice."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        return out * 2 if function is torch.nn.functional.linear else out


class Negated(TorchDispatchMode):
    """Every square root's opposite."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        return -out if function is torch.ops.aten.rsqrt.default else out


@pytest.mark.parametrize("mode", [Doubled, Negated])
def test_modes_of_the_calling_thread(mode: Any) -> None:
    model = models.tiny("llama")
    usual = seam.served(model)
    with mode():  # the engine's twin is not made under it
        engine = hf_cb.install(model)
        want = seam.plain(model)
        assert not torch.equal(want, usual)
        assert torch.equal(seam.served(model), want)
    assert engine.stats().native_calls == {f"{mode.__name__} is on in the calling thread": 1}
    assert torch.equal(seam.served(model), usual)
    with torch.device("cpu"):  # a mode too, that changes nothing where devices are named
        assert torch.equal(seam.served(model), usual)
    assert sum(engine.stats().native_calls.values()) == 1
    hf_cb.uninstall(model)
