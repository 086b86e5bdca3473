"""Installing, removing, and backends of one's own."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from typing import Any

import inside
import models
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

import hf_cb
from hf_cb import installation as backends

PROMPT = torch.tensor([[5, 6, 7, 8]])
NEW = 6


class Reversed(hf_cb.GenerationBackend):
    """Plain generate, with the result turned round."""

    def attach(self) -> None:
        self.attached = True

    def detach(self) -> None:
        self.attached = False

    def why_not(self, call: dict[str, Any]) -> str | None:
        return None

    def generate(self, arguments: dict[str, Any], seed: int | None, service: Any) -> Any:
        return self.plain(arguments, seed).flip(1)


class Failing(Reversed):
    def attach(self) -> None:
        raise ArithmeticError("cannot attach")


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_BACKENDS", dict(backends._BACKENDS))


def plain(model: PreTrainedModel) -> torch.Tensor:
    return type(model).generate(model, PROMPT, max_new_tokens=NEW)


# -- installing -----------------------------------------------------------------------------------------------------------


def test_installing_twice(llama: PreTrainedModel) -> None:
    engine = hf_cb.install(llama)
    for backend in ("continuous_batching", "serialized"):
        with pytest.raises(hf_cb.AlreadyInstalledError, match=r"uninstall\(model\)"):
            hf_cb.install(llama, backend=backend)
    assert hf_cb.get_engine(llama) is engine
    assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), plain(llama))
    hf_cb.uninstall(llama)


def test_what_is_not_installed(llama: PreTrainedModel) -> None:
    for ask in (hf_cb.uninstall, hf_cb.get_engine):
        with pytest.raises(hf_cb.NotInstalledError, match=r"^model: "):
            ask(llama)
    hf_cb.install(llama)
    hf_cb.uninstall(llama)
    for ask in (hf_cb.uninstall, hf_cb.get_engine):
        with pytest.raises(hf_cb.NotInstalledError, match=r"^model: "):
            ask(llama)


def test_installing_from_many_threads(llama: PreTrainedModel) -> None:
    barrier, outcomes = threading.Barrier(6), []

    def install() -> None:
        barrier.wait()
        try:
            outcomes.append(hf_cb.install(llama))
        except hf_cb.AlreadyInstalledError as error:
            outcomes.append(type(error))

    threads = [threading.Thread(target=install) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(hf_cb.AlreadyInstalledError) == 5
    assert hf_cb.get_engine(llama) in outcomes
    hf_cb.uninstall(llama)


def test_a_scope_ends_with_an_error_too(llama: PreTrainedModel) -> None:
    engines = []

    def fail_inside() -> None:
        with hf_cb.continuous_batching(llama) as engine:
            engines.append(engine)
            llama.generate(PROMPT, max_new_tokens=NEW)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail_inside()
    assert "generate" not in vars(llama)
    with pytest.raises(hf_cb.EngineClosedError):
        engines[0].submit(PROMPT, max_new_tokens=NEW)


# -- generate wrapped by somebody, as tracers do ---------------------------------------------------------------------------


def wrap(model: PreTrainedModel) -> list[int]:
    """Returns the list in which the wrapper counts."""
    inner, calls = model.generate, []

    def traced(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        return inner(*args, **kwargs)

    model.generate = traced
    return calls


def test_a_wrapped_generate(llama: PreTrainedModel) -> None:
    want = plain(llama)
    engine = hf_cb.install(llama)
    installed = llama.generate
    calls = wrap(llama)
    wrapper = vars(llama)["generate"]
    assert hf_cb.get_engine(llama) is engine
    with pytest.raises(hf_cb.AlreadyInstalledError):
        hf_cb.install(llama)
    assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), want)
    assert engine.stats().output_tokens == NEW
    cache = weakref.ref(inside.cache(engine))
    hf_cb.uninstall(llama)
    assert vars(llama)["generate"] is wrapper  # the user's
    assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), want)
    assert engine.stats().output_tokens == NEW
    assert len(calls) == 2
    with pytest.raises(hf_cb.NotInstalledError):
        hf_cb.get_engine(llama)
    del engine
    gc.collect()
    assert cache() is None  # the wrapper keeps nothing of the engine
    llama.generate = installed  # the tracer leaves
    with hf_cb.continuous_batching(llama) as engine:
        assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), want)
        assert engine.stats().native_calls == {}
    assert "generate" not in vars(llama)


def test_a_scope_in_which_generate_was_wrapped(llama: PreTrainedModel) -> None:
    def fail_inside() -> None:
        with hf_cb.continuous_batching(llama):
            wrap(llama)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail_inside()
    assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), plain(llama))
    own = vars(llama)["generate"]
    with hf_cb.continuous_batching(llama) as engine:  # round a wrapper that was there before
        llama.generate = lambda *args, **kwargs: "another one"  # in the place of what was installed
        assert hf_cb.get_engine(llama) is engine
    assert llama.generate() == "another one"
    assert not engine.is_open
    del llama.generate
    with hf_cb.continuous_batching(llama) as engine:
        hf_cb.uninstall(llama)
    assert own(PROMPT, max_new_tokens=NEW).shape == (1, PROMPT.shape[1] + NEW)


def test_after_shutdown(llama: PreTrainedModel) -> None:
    engine = hf_cb.install(llama)
    llama.generate(PROMPT, max_new_tokens=NEW)
    engine.shutdown()
    engine.shutdown()
    for call in (
        lambda: engine.submit(PROMPT, max_new_tokens=NEW),
        lambda: engine.generate_batch([PROMPT], max_new_tokens=NEW),
        lambda: llama.generate(PROMPT, max_new_tokens=NEW),
    ):
        with pytest.raises(hf_cb.EngineClosedError, match="shut down"):
            call()
    hf_cb.uninstall(llama)
    assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), plain(llama))


def test_two_models_have_two_engines(llama: PreTrainedModel) -> None:
    other = models.tiny("gpt2")
    with hf_cb.continuous_batching(llama) as first, hf_cb.continuous_batching(other) as second:
        assert first is not second
        with ThreadPoolExecutor(8) as threads:
            got = list(threads.map(lambda model: model.generate(PROMPT, max_new_tokens=NEW), [llama, other] * 6))
        assert all(torch.equal(out, plain(model)) for out, model in zip(got, [llama, other] * 6, strict=True))
        assert first.stats().output_tokens == second.stats().output_tokens == 6 * NEW


# -- backends of one's own ------------------------------------------------------------------------------------------------


def test_an_unknown_backend(llama: PreTrainedModel) -> None:
    for name in ("continuous", "", 5):
        with pytest.raises(hf_cb.InvalidArgumentError, match=r"^backend: takes one of continuous_batching, serialized; got"):
            hf_cb.install(llama, backend=name)
    assert "generate" not in vars(llama)


def test_a_registered_backend(llama: PreTrainedModel) -> None:
    hf_cb.register_backend("reversed", Reversed)
    hf_cb.register_backend("reversed", Reversed)  # the same again is fine
    assert hf_cb.install(llama, backend="reversed") is None
    assert hf_cb.get_engine(llama) is None
    backend = backends.installed_backend(llama)
    assert isinstance(backend, Reversed)
    assert backend.attached
    assert backend.model is llama
    assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), plain(llama).flip(1))
    hf_cb.uninstall(llama)
    assert not backend.attached
    assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), plain(llama))


def test_wrong_registrations() -> None:
    with pytest.raises(hf_cb.InvalidArgumentError, match=r"^name: a backend named 'serialized' is registered already"):
        hf_cb.register_backend("serialized", Reversed)
    for wrong in (object, Reversed.attach, "Reversed", None):
        with pytest.raises(hf_cb.InvalidArgumentError, match=r"^backend: takes a subclass of GenerationBackend"):
            hf_cb.register_backend("mine", wrong)


def test_a_backend_that_cannot_attach_leaves_the_model_alone(llama: PreTrainedModel) -> None:
    hf_cb.register_backend("failing", Failing)
    with pytest.raises(ArithmeticError, match="cannot attach"):
        hf_cb.install(llama, backend="failing")
    assert "generate" not in vars(llama)
    with hf_cb.continuous_batching(llama):
        pass


def test_an_incomplete_backend_cannot_be_made(llama: PreTrainedModel) -> None:
    class Incomplete(hf_cb.GenerationBackend):
        pass

    hf_cb.register_backend("incomplete", Incomplete)
    with pytest.raises(TypeError, match="abstract"):
        hf_cb.install(llama, backend="incomplete")


def test_a_backend_from_an_entry_point(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("packaged", f"{__name__}:Reversed", backends.ENTRY_POINT_GROUP)
    asked = []

    def entry_points(group: str, name: str) -> Iterator[EntryPoint]:
        asked.append((group, name))
        return iter([entry] if name == entry.name else [])

    monkeypatch.setattr(backends, "entry_points", entry_points)
    hf_cb.install(llama, backend="packaged")
    assert torch.equal(llama.generate(PROMPT, max_new_tokens=NEW), plain(llama).flip(1))
    hf_cb.uninstall(llama)
    assert asked == [("hf_cb.backends", "packaged")]


# -- the serialized backend -----------------------------------------------------------------------------------------------


class NoteSteps(LogitsProcessor):
    """Which thread's call made each step of plain generate."""

    def __init__(self) -> None:
        self.runs: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.runs.append(threading.get_ident())
        return scores


def test_serialized(llama: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, models.VOCAB, (1, length), generator=generator) for length in (3, 9, 1, 14, 6, 2, 11, 5)]
    want = [llama.generate(row, max_new_tokens=NEW) for row in rows]
    noted = NoteSteps()
    assert hf_cb.install(llama, backend="serialized") is None
    call = {"max_new_tokens": NEW, "logits_processor": LogitsProcessorList([noted])}
    with ThreadPoolExecutor(len(rows)) as threads:
        got = list(threads.map(lambda row: llama.generate(row, **call), rows))
    assert all(map(torch.equal, got, want))
    # One call's steps are not interleaved with another's.
    calls = [noted.runs[i : i + NEW] for i in range(0, len(noted.runs), NEW)]
    assert len(calls) == len(rows)
    assert all(len(set(steps)) == 1 for steps in calls)
    before = torch.get_rng_state()
    seeded = [llama.generate(rows[0], do_sample=True, temperature=3.0, max_new_tokens=20, seed=seed) for seed in (4, 4, 5)]
    assert torch.equal(torch.get_rng_state(), before)
    hf_cb.uninstall(llama)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        plain_sample = llama.generate(rows[0], do_sample=True, temperature=3.0, max_new_tokens=20)
    assert torch.equal(seeded[0], plain_sample)
    assert torch.equal(seeded[1], plain_sample)
    assert not torch.equal(seeded[2], plain_sample)


def test_the_scope_is_for_continuous_batching_alone(llama: PreTrainedModel) -> None:
    with pytest.raises(hf_cb.InvalidArgumentError, match=r"^backend"), hf_cb.continuous_batching(llama, backend="serialized"):
        raise AssertionError("never noted")
    assert "generate" not in vars(llama)


def test_native_calls_run_one_at_a_time(llama: PreTrainedModel) -> None:
    noted = NoteSteps()
    call = {
        "max_new_tokens": NEW,
        "logits_processor": LogitsProcessorList([noted]),
        "position_ids": torch.arange(1, PROMPT.shape[1] + 1)[None],
    }
    with hf_cb.continuous_batching(llama) as engine, ThreadPoolExecutor(6) as threads:
        want = plain(llama)
        got = list(threads.map(lambda _: llama.generate(PROMPT, **call), range(6)))
        assert all(torch.equal(out, want) for out in got)
        assert engine.stats().native_calls == {"position_ids other than the mask gives": 6}
    calls = [noted.runs[i : i + NEW] for i in range(0, len(noted.runs), NEW)]
    assert all(len(set(steps)) == 1 for steps in calls)
