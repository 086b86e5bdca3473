"""PEFT's own models: installed, switched, merged, and as they answer without an engine."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import models
import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from seam import word_tokenizer
from torch import nn
from transformers import TextGenerationPipeline
from transformers.generation.streamers import BaseStreamer

import hf_cb

pytestmark = [
    pytest.mark.timeout(20),
    # PEFT's own remarks on what these tests do
    pytest.mark.filterwarnings("ignore:Already unmerged:UserWarning"),
    pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning"),
    pytest.mark.filterwarnings("ignore:Adapter .* was active which is now deleted:UserWarning"),
]

KIND = {"task_type": "CAUSAL_LM"}
IDS = torch.tensor([[5, 6, 7, 8, 9, 40, 3]])
FIRST = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False, lora_dropout=0.1, **KIND)
SECOND = LoraConfig(r=4, lora_alpha=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **KIND)


def with_adapters(first: Any = FIRST, second: Any = SECOND, **overrides: Any) -> PeftModel:
    """The tiny Llama with adapters "default" and "second", the same at every call, strong enough to decide the tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = get_peft_model(models.tiny("llama", **overrides), first)
        if second is not None:
            model.add_adapter("second", second)
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lora_", "ia3_", "prompt_", "tokens_delta")):
                parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()


def answer(model: PeftModel, **options: Any) -> list[int]:
    return model.generate(**{"input_ids": IDS, "max_new_tokens": 12, "do_sample": False, **options})[0].tolist()


@dataclass(frozen=True)
class Twins:
    plain: PeftModel
    served: PeftModel
    engine: hf_cb.Engine

    def same(self, native: str | None = None, **options: Any) -> list[int]:
        """What both answer; so do their weights agree afterwards."""
        want = answer(self.plain, **options)
        before = sum(self.engine.stats().native_calls.values())
        assert answer(self.served, **options) == want
        reasons = self.engine.stats().native_calls
        assert (sum(reasons.values()) > before) == (native is not None)
        assert native is None or any(native in reason for reason in reasons)
        for ours, theirs in zip(self.served.parameters(), self.plain.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)
        return want

    def both(self, change: Callable[[PeftModel], Any]) -> None:
        change(self.plain)
        change(self.served)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        with self.plain.disable_adapter(), self.served.disable_adapter():
            yield


@contextlib.contextmanager
def twins(*args: Any, **overrides: Any) -> Iterator[Twins]:
    plain, served = with_adapters(*args, **overrides), with_adapters(*args, **overrides)
    with hf_cb.continuous_batching(served) as engine:
        yield Twins(plain, served, engine)


def merged(model: nn.Module) -> list[list[str]]:
    return [list(layer.merged_adapters) for layer in model.modules() if hasattr(layer, "merged_adapters")]


def test_switching_between_calls() -> None:
    with twins() as both:
        seen = [both.same()]
        both.both(lambda model: model.set_adapter("second"))
        seen.append(both.same())
        with both.disabled():
            seen.append(both.same())
        assert both.same() == seen[1]
        both.both(lambda model: model.base_model.set_adapter(["default", "second"]))
        seen.append(both.same())
        both.both(lambda model: model.set_adapter("default"))
        assert both.same() == seen[0]
        assert len({tuple(tokens) for tokens in seen}) == 4  # every adapter decides


def test_adapters_come_and_go() -> None:
    with twins() as both:
        both.same()
        both.both(lambda model: model.delete_adapter("second"))
        both.same()

        def add(model: PeftModel) -> None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(9)
                model.add_adapter("third", SECOND)
                model.set_adapter("third")
            model.eval()

        both.both(add)
        both.same()


def test_merging_and_unmerging() -> None:
    with twins() as both:
        unmerged = both.same()
        both.both(lambda model: model.merge_adapter())
        assert any(merged(both.served))
        assert both.same() == unmerged
        both.both(lambda model: model.unmerge_adapter())
        assert both.same() == unmerged
        assert not any(merged(both.served))


def test_adapters_that_are_switched_off_while_they_are_merged() -> None:
    """PEFT's layers then undo the merge in their forward, which the engine runs on a copy of them over the same weights."""
    with twins() as both:
        both.same()
        both.both(lambda model: model.merge_adapter())
        both.same()
        with both.disabled():
            off = both.same()
        assert merged(both.served) == merged(both.plain)
        assert both.same() != off
        both.both(lambda model: model.set_adapter("second"))
        both.same()


def test_unloading() -> None:
    with twins() as both:
        want = both.same()
        plain, served = both.plain.merge_and_unload(), both.served.merge_and_unload()
        assert answer(served) == answer(plain) == want
        assert hf_cb.get_engine(served) is both.engine


def test_training_an_adapter_between_calls() -> None:
    with twins() as both:

        def step(model: PeftModel) -> None:
            model(input_ids=IDS, labels=IDS).loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.5 * parameter.grad
                        parameter.grad = None

        before = both.same()
        both.both(step)
        assert both.same() != before


class Gate(BaseStreamer):
    """Tells when the first tokens have come."""

    def __init__(self) -> None:
        self.first, self.puts = threading.Event(), 0

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 3:
            self.first.set()

    def end(self) -> None:
        """Nothing to do."""


LONG = 300


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.set_adapter("second"),
        lambda model: model.delete_adapter("default"),
        lambda model: model.base_model.disable_adapter_layers(),
        lambda model: model.merge_adapter(),
    ],
    ids=["set", "delete", "disable", "merge"],
)
def test_a_call_finishes_with_the_adapter_that_it_began_with(change: Callable[[PeftModel], Any]) -> None:
    plain = with_adapters()
    served = with_adapters()
    want = answer(plain, max_new_tokens=LONG)
    change(plain)
    with hf_cb.continuous_batching(served) as engine, ThreadPoolExecutor(2) as threads:
        gate = Gate()
        running = threads.submit(answer, served, max_new_tokens=LONG, streamer=gate)
        assert gate.first.wait(10)
        with engine.pause():
            change(served)
            assert not running.done()
        later = threads.submit(answer, served)
        assert running.result() == want
        assert later.result() == answer(plain)


def test_merging_and_unmerging_in_pauses_while_a_call_runs() -> None:
    want = answer(with_adapters(), max_new_tokens=LONG)
    served = with_adapters()
    with hf_cb.continuous_batching(served) as engine, ThreadPoolExecutor(1) as threads:
        gate = Gate()
        running = threads.submit(answer, served, max_new_tokens=LONG, streamer=gate)
        assert gate.first.wait(10)
        for change in (served.merge_adapter, served.unmerge_adapter, served.merge_adapter):
            steps = engine.stats().steps
            with engine.pause():
                change()
            while engine.stats().steps < steps + 3 and not running.done():
                time.sleep(0.001)
        assert not running.done()
        assert running.result() == want


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=4, target_modules="all-linear", use_dora=True, init_lora_weights=False, **KIND),
        LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"], **KIND),
        IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], **KIND),
    ],
    ids=["dora", "embedding", "ia3"],
)
def test_other_kinds(config: Any) -> None:
    with twins(config, None, tie_word_embeddings=False) as both:
        tokens = both.same()
        with both.disabled():
            assert both.same() != tokens or isinstance(config, LoraConfig)
        assert both.same() == tokens


TRAINED = LoraConfig(trainable_token_indices=[5, 7, 40], **KIND)


@pytest.mark.parametrize("tied", [False, True])
def test_tokens_that_are_trained(tied: bool) -> None:
    """The input embedding is PEFT's then, and its weight is computed from two others: there at install, or added later."""
    with twins(TRAINED, None, tie_word_embeddings=tied) as both:
        before = both.same()

        def train(model: PeftModel) -> None:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "tokens_delta" in name:
                        parameter.neg_()

        both.both(train)
        assert both.same() != before
        with both.disabled():
            both.same()
    with twins(FIRST, None, tie_word_embeddings=tied) as both:
        before = both.same()

        def add(model: PeftModel) -> None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(2)
                model.add_adapter("late", TRAINED)

        both.both(add)
        both.both(lambda model: model.set_adapter("late"))
        assert both.same() != before
        assert both.engine.submit(IDS, max_new_tokens=12).result().tokens == tuple(answer(both.plain)[7:])
        both.both(lambda model: model.set_adapter("default"))
        assert both.same() == before


def test_virtual_tokens_run_natively() -> None:
    with twins(PromptTuningConfig(num_virtual_tokens=5, **KIND), None) as both:
        tokens = both.same(native="prepare_inputs_for_generation is not transformers")
        base = both.plain.get_base_model()
        assert base.generate(IDS, max_new_tokens=12, do_sample=False)[0].tolist() != tokens
        with both.disabled():
            both.same()


def test_an_adapter_for_each_row_runs_natively() -> None:
    with twins() as both:
        rows = IDS.repeat(2, 1)
        options = {"input_ids": rows, "adapter_names": ["default", "second"], "max_new_tokens": 12, "do_sample": False}
        want = both.plain.generate(**options)
        assert torch.equal(both.served.generate(**options), want)
        assert not torch.equal(want[0], want[1])
        assert both.engine.stats().native_calls
        both.same()


def pipe(model: PeftModel) -> TextGenerationPipeline:
    return TextGenerationPipeline(model=model, tokenizer=word_tokenizer(), device="cpu")


def test_a_pipeline_with_virtual_tokens() -> None:
    """PEFT's generate exchanges a method of the model while it runs: calls of it must not overlap."""
    config = PromptTuningConfig(num_virtual_tokens=5, **KIND)
    plain, served = (pipe(with_adapters(config, None)) for _ in range(2))
    prompts = [f"w{i} w{i + 1} w9" for i in range(4, 20)]
    with hf_cb.continuous_batching(served):
        assert served(prompts, do_sample=False, max_new_tokens=6) == plain(prompts, do_sample=False, max_new_tokens=6)


def test_a_pipeline_with_adapters() -> None:
    plain, served = pipe(with_adapters()), pipe(with_adapters())
    prompts = ["w4 w5 w6", "w90", "w7 w8 w9 w10 w11"]
    with hf_cb.continuous_batching(served) as engine:
        for adapter in ("default", "second", "default"):
            plain.model.set_adapter(adapter)
            served.model.set_adapter(adapter)
            want = plain(prompts, do_sample=False, max_new_tokens=9)
            assert served(prompts, do_sample=False, max_new_tokens=9) == want
        assert not engine.stats().native_calls


def test_uninstalling() -> None:
    model = with_adapters()
    base = model.get_base_model()
    before = dict(vars(base))
    engine = hf_cb.install(model)
    assert hf_cb.get_engine(model) is hf_cb.get_engine(base) is engine
    with pytest.raises(hf_cb.AlreadyInstalledError):
        hf_cb.install(base)
    hf_cb.uninstall(model)
    assert vars(base) == before
