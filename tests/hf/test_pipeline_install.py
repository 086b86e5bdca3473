"""Pipelines are installed and uninstalled, in company too; many threads share one, and its tokenizer."""

from __future__ import annotations

import copy
import functools
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from crowd import held
from transformers import TextGenerationPipeline
from two_pipes import pipe_of, pipes, texts

import hf_cb
from hf_cb.hf.calls.tokenizing import tokenizing

pytestmark = pytest.mark.timeout(20)

TEXTS = texts(3, 17, 1, 9, 30, 5, 12, 2, 8)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 7}


def test_uninstall_restores_everything() -> None:
    pipe = pipe_of()
    before, of_model = dict(vars(pipe)), dict(vars(pipe.model))
    engine = hf_cb.install(pipe)
    assert vars(pipe) == before
    assert isinstance(pipe, TextGenerationPipeline)
    assert (type(pipe).__name__, type(pipe).__module__) == ("TextGenerationPipeline", TextGenerationPipeline.__module__)
    assert hf_cb.get_engine(pipe) is hf_cb.get_engine(pipe.model) is engine
    hf_cb.uninstall(pipe)
    assert type(pipe) is TextGenerationPipeline
    assert vars(pipe) == before
    assert vars(pipe.model) == of_model
    with pytest.raises(hf_cb.NotInstalledError):
        hf_cb.uninstall(pipe)
    with pytest.raises(hf_cb.NotInstalledError):
        hf_cb.get_engine(pipe)


def test_pipelines_of_one_model() -> None:
    first = pipe_of()
    second = TextGenerationPipeline(model=first.model, tokenizer=first.tokenizer, device="cpu")
    engine = hf_cb.install(first)
    assert hf_cb.install(second) is engine
    with pytest.raises(hf_cb.AlreadyInstalledError):
        hf_cb.install(second)
    with pytest.raises(hf_cb.AlreadyInstalledError):
        hf_cb.install(first.model)
    hf_cb.uninstall(second.model)
    assert type(first) is type(second) is TextGenerationPipeline


def test_a_pipeline_that_is_given_another_model() -> None:
    pipe, other = pipe_of(), models.tiny("gpt2")
    old = pipe.model
    engine = hf_cb.install(pipe)
    pipe.model = other
    with pytest.raises(hf_cb.NotInstalledError):
        hf_cb.get_engine(pipe)
    want = pipe_of("gpt2")(TEXTS, **GREEDY)
    assert pipe(TEXTS, **GREEDY) == want  # plainly
    assert hf_cb.install(pipe) is not engine
    assert pipe(TEXTS, **GREEDY) == want
    hf_cb.uninstall(old)
    assert hf_cb.get_engine(pipe) is not None
    assert type(pipe) is not TextGenerationPipeline
    hf_cb.uninstall(other)
    assert type(pipe) is TextGenerationPipeline


def test_a_pipeline_joins_an_installed_model_but_does_not_change_its_settings() -> None:
    pipe = pipe_of()
    engine = hf_cb.install(pipe.model)
    for options in ({"max_batch_size": 3}, {"config": hf_cb.CBConfig()}, {"backend": "serialized"}):
        with pytest.raises(hf_cb.AlreadyInstalledError):
            hf_cb.install(pipe, **options)
    assert type(pipe) is TextGenerationPipeline
    assert hf_cb.install(pipe) is engine
    hf_cb.uninstall(pipe)


def test_a_pipeline_without_a_model_that_generates() -> None:
    with pytest.raises(hf_cb.UnsupportedModelError, match="model: takes"):
        hf_cb.install(object())


def test_copies_are_plain() -> None:
    with pipes() as made:
        want = made.plain(TEXTS[:3], **GREEDY)
        for copied in (copy.deepcopy(made.served), pickle.loads(pickle.dumps(made.served)), copy.copy(made.served)):
            assert type(copied) is TextGenerationPipeline
            assert copied(TEXTS[:3], **GREEDY) == want
        assert made.served(TEXTS[:3], **GREEDY) == want


def test_a_pipeline_class_of_the_users() -> None:
    class Shouting(TextGenerationPipeline):
        def postprocess(self, outputs: Any, **parameters: Any) -> Any:
            return [record["generated_text"].upper() for record in super().postprocess(outputs, **parameters)]

    plain = pipe_of()
    pipe = Shouting(model=models.tiny("llama"), tokenizer=plain.tokenizer, device="cpu")
    with hf_cb.continuous_batching(pipe):
        assert isinstance(pipe, Shouting)
        assert pipe(TEXTS, **GREEDY) == [[item[0]["generated_text"].upper()] for item in plain(TEXTS, **GREEDY)]
    assert type(pipe) is Shouting


def test_a_class_that_is_derived_from_the_installed_one() -> None:
    """By a tracer, say: it stays, and what it calls is the pipeline's own once that is uninstalled."""
    plain, pipe = pipe_of(), pipe_of()
    want = plain(TEXTS, **GREEDY)
    hf_cb.install(pipe)
    served, forwards = type(pipe), []

    class Traced(served):
        def forward(self, *args: Any, **parameters: Any) -> Any:
            forwards.append(self)
            return super().forward(*args, **parameters)

    pipe.__class__ = Traced
    assert pipe(TEXTS, **GREEDY) == want
    hf_cb.uninstall(pipe)
    assert type(pipe) is Traced
    assert pipe(TEXTS, **GREEDY) == want
    with hf_cb.continuous_batching(pipe) as engine:
        assert pipe(TEXTS, **GREEDY) == want
        assert sum(engine.stats().finished.values()) == len(TEXTS)
    assert type(pipe) is Traced
    assert len(forwards) == 3 * len(TEXTS)


@pytest.mark.timeout(90)  # it starts an interpreter
def test_what_is_saved_while_installed_loads_without_the_package(tmp_path: Path) -> None:
    with pipes() as made:
        want = made.plain(TEXTS[:2], **GREEDY)
        ids = torch.tensor([[5, 6, 7]])
        tokens = made.plain.model.generate(ids, max_new_tokens=5)
        own = models.tiny("llama")
        own.generate = functools.partial(type(own).generate, own, max_new_tokens=5)
        with hf_cb.continuous_batching(own):
            torch.save((made.served, made.served.model, copy.deepcopy(made.served.model), own), tmp_path / "saved")
    program = f"""
import sys
sys.modules["hf_cb"] = None  # importing it fails
import torch
pipe, *models = torch.load({str(tmp_path / "saved")!r}, weights_only=False)
assert pipe({TEXTS[:2]!r}, **{GREEDY!r}) == {want!r}
for model in models:
    assert model.generate(torch.tensor({ids.tolist()}), max_new_tokens=5).tolist() == {tokens.tolist()}
assert isinstance(model.generate.args[0], type(model)) and model.generate.args[0] is model
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_users_changes_of_an_installed_pipeline_count() -> None:
    with pipes() as made:
        for pipe in (made.plain, made.served):
            pipe.tokenizer.chat_template = "w30 {{ messages[0]['content'] }}"
            pipe._batch_size = 2
        made.same([[{"role": "user", "content": text}] for text in TEXTS])


def test_pipes_called_from_many_threads_share_batches() -> None:
    with pipes(options={"record_steps": 1000}) as made:
        want = made.plain(TEXTS, **GREEDY)
        with ThreadPoolExecutor(len(TEXTS)) as threads:
            with held(made.engine, len(TEXTS)):
                results = [threads.submit(made.served, text, **GREEDY) for text in TEXTS]
            assert [result.result() for result in results] == want
        assert max(len(step.sampled) for step in made.engine.steps()) == len(TEXTS)


WAYS: list[dict[str, Any]] = [
    {},
    {"truncation": True, "tokenizer_encode_kwargs": {"max_length": 3}},
    {"padding": "max_length", "tokenizer_encode_kwargs": {"max_length": 40}},
    {"prefix": "w10 w20 "},
    {"stop_sequence": "w50"},
    {"truncation": True, "tokenizer_encode_kwargs": {"max_length": 8, "padding": "max_length"}},
]
NATIVE: dict[str, Any] = {"stop_sequence": "w50", "num_beams": 2}


def test_one_tokenizer_on_many_threads() -> None:
    """Each call sets the tokenizer's padding and truncation anew: what another thread tokenizes then must not get them."""
    with pipes() as made:
        ways = [*WAYS, NATIVE]
        calls = [(TEXTS[i % len(TEXTS)], ways[i % len(ways)]) for i in range(63)]
        want = [made.plain(text, **GREEDY, **way) for text, way in calls]
        with ThreadPoolExecutor(12) as threads:
            got = [threads.submit(made.served, text, **GREEDY, **way) for text, way in calls]
            assert [result.result() for result in got] == want


def test_the_tokenizer_is_used_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a pipeline, or a call with stop strings, does with it."""
    with pipes() as made:
        unlocked: list[str] = []
        cls = type(made.served.tokenizer)

        def noted(name: str) -> Any:
            own = getattr(cls, name)

            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                if self is made.served.tokenizer and _is_free():
                    unlocked.append(name)
                return own(self, *args, **kwargs)

            return method

        for name in ("__call__", "decode", "apply_chat_template", "get_vocab", "_encode_plus"):
            monkeypatch.setattr(cls, name, noted(name))
        chat = [{"role": "user", "content": TEXTS[0]}]
        with ThreadPoolExecutor(2) as threads:
            for inputs, way in ((chat, {}), (TEXTS, {}), *((TEXTS[1], way) for way in WAYS), (TEXTS[2], NATIVE)):
                threads.submit(made.served, inputs, **GREEDY, **way).result()
        assert not unlocked


def _is_free() -> bool:
    """Whether no thread holds the lock: another thread than this one gets it."""
    found: list[bool] = []

    def look() -> None:
        lock: Any = tokenizing()
        if lock.acquire(blocking=False):
            lock.release()
            found.append(True)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return bool(found)
