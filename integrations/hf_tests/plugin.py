"""A pytest plugin: every model that generates in a test is installed first, and each call that was served is repeated plainly.

    python -m pytest -p integrations.hf_tests.plugin --hf-cb-record FILE --hf-cb-install tests/...

Both runs, plain (without --hf-cb-install) and installed, write a line of JSON to FILE for each test's outcome; the installed
one for each call too. Of the files that test models, both run the tests of transformers' generation mixin alone, with masks
that pad on the left: the mixin's own pad on the right, as no caller does, and such calls run natively. A call that ran natively
for one of NATIVE is made twice more without those, through the engine and plainly; these are counted as trimmed, not as served.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase, TextGenerationPipeline
from transformers.generation.streamers import BaseStreamer

import hf_cb
from hf_cb.continuous import ContinuousBatchingBackend
from hf_cb.engine import Engine
from hf_cb.errors import HFCBError
from hf_cb.hf.pipelines.pipeline import ServedPipeline
from hf_cb.installation import installed_backend
from hf_cb.request import Service
from integrations.hf_tests.differences import differences

OPTIONS = {"block_size": 4, "num_blocks": 512}  # small models, made by the thousand
SEED = 11
NATIVE = ("output_attentions", "output_hidden_states", "position_ids", "token_type_ids", "assistant_model", "streamer")
MIXIN = "tests.generation.test_utils"  # where transformers has it

_record: Record
_own = threading.local()  # what this thread is at: `installing`, and `was_native` of its call
_comparing = threading.RLock()  # calls at the same time, a pipeline's: torch's generator is seeded, and put back, by one alone
_installed: list[tuple[weakref.ref[PreTrainedModel], Engine]] = []  # in this test


class Record:
    """The file of a run. `test` is the one that runs now."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._lock = threading.Lock()
        self.test = ""

    def write(self, **entry: Any) -> None:
        with self._lock:
            self._file.write(json.dumps({"test": self.test, **entry}) + "\n")


class ComparedBackend(ContinuousBatchingBackend):
    """Continuous batching whose every served call is made once more, plainly, on the same model."""

    def generate(self, arguments: dict[str, Any], seed: int | None, service: Service) -> Any:
        kept = _copied(arguments)
        got, is_native = self._served(arguments, seed, service)
        with _comparing, torch.random.fork_rng(devices=[]):
            if is_native:
                _record.write(call="native")
                self._try_trimmed(got, kept, seed, service)
            else:
                is_streamers = isinstance(got, Exception) and _is_of(arguments.get("streamer"), got)
                _record.write(call="served", differs=[] if is_streamers else self._differences(got, kept, seed, service))
        if isinstance(got, Exception):
            raise got
        return got

    def plain(self, arguments: dict[str, Any], seed: int | None = None) -> Any:
        _own.was_native = True
        return super().plain(arguments, seed)

    def _served(self, arguments: dict[str, Any], seed: int | None, service: Service) -> tuple[Any, bool]:
        """What it gave or raised, and whether it ran natively."""
        _own.was_native = False
        got = _outcome(lambda: super(ComparedBackend, self).generate(arguments, seed, service))
        return got, _own.was_native

    def _try_trimmed(self, got: Any, kept: dict[str, Any], seed: int | None, service: Service) -> None:
        trimmed = {name: value for name, value in kept.items() if name not in NATIVE}
        if isinstance(got, Exception) or len(trimmed) == len(kept) or self.why_not(trimmed) is not None:
            return
        got, is_native = self._served(_copied(trimmed), seed, service)
        if not is_native:
            _record.write(call="trimmed", differs=self._differences(got, trimmed, seed, service))

    def _differences(self, got: Any, kept: dict[str, Any], seed: int | None, service: Service) -> list[str]:
        """A call that samples without a seed is compared by its types and keys, and made again with one if it is one row's."""
        is_whole = self.model.dtype in (torch.float32, torch.float64)
        is_drawn = seed is None and bool(self._setting(kept, "do_sample"))
        want = _outcome(lambda: super(ComparedBackend, self).plain(_copied(kept), seed))
        found = differences(got, want, values=is_whole and not is_drawn)
        if not is_drawn or not is_whole or isinstance(want, Exception) or not self._is_one_row(kept):
            return found
        again, is_native = self._served(_copied(kept), SEED, service)
        want = _outcome(lambda: super(ComparedBackend, self).plain(_copied(kept), SEED))
        return found if is_native else found + [f"with a seed, {said}" for said in differences(again, want)]

    def _is_one_row(self, arguments: dict[str, Any]) -> bool:
        ids = next((arguments[name] for name in ("input_ids", "inputs") if arguments.get(name) is not None), None)
        rows = 1 if ids is None else len(ids)
        return rows == 1 and all((self._setting(arguments, n) or 1) == 1 for n in ("num_return_sequences", "num_beams"))

    def _setting(self, arguments: dict[str, Any], name: str) -> Any:
        for place in (
            arguments,
            vars(arguments.get("generation_config") or self.model.generation_config),
            vars(self.model.generation_config),
        ):
            if place.get(name) is not None:
                return place[name]
        return None


class _AtFirstUse:
    """Stands in the class for `generate`: a model that has none of its own yet is installed when it is looked for there.

    The class itself has the original, which is what hf_cb and tests that look at it find.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original

    def __get__(self, model: Any, cls: type) -> Callable[..., Any]:
        if model is None:
            return self._original
        is_overridden = cls.generate is not self._original  # then this is its super().generate
        if not is_overridden and not getattr(_own, "installing", False):
            _install(model)
        return vars(model).get("generate") or self._original.__get__(model, cls)


class _Silent(BaseStreamer):
    def put(self, value: torch.Tensor) -> None:
        """The caller's own has been told once."""

    def end(self) -> None:
        """Likewise."""


def _install(target: Any) -> None:
    """A model or a pipeline. What hf_cb refuses stays plain, which is written down."""
    model = getattr(target, "model", target) if isinstance(target, TextGenerationPipeline) else target
    _own.installing = True
    try:
        was_installed = installed_backend(model) is not None
        engine = hf_cb.install(target, backend="compared", **({} if was_installed else OPTIONS))
    except HFCBError as error:
        _record.write(refused=f"{type(error).__name__}: {error}")
    else:
        if not was_installed and engine is not None:
            _installed.append((weakref.ref(model), engine))
    finally:
        _own.installing = False


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


def _is_of(streamer: Any, error: Exception) -> bool:
    """Whether the caller's streamer raised it, as it would in plain generate; the repeated call has a silent one."""
    return any(frame.f_locals.get("self", frame) is streamer for frame, _ in traceback.walk_tb(error.__traceback__))


def _copied(arguments: dict[str, Any]) -> dict[str, Any]:
    """For another call: with what the first one writes in (caches, processors with a memory) as it was."""
    return {name: _copy(value) for name, value in arguments.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, BaseStreamer):
        return _Silent()
    if isinstance(value, torch.nn.Module | PreTrainedTokenizerBase):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # generators, tensors with a graph, locks
        return value


def _turned(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """The mixin's inputs, with the padding of their masks on the left."""

    @functools.wraps(prepare)
    def turned(self: Any, *args: Any, **kwargs: Any) -> Any:
        config, inputs = prepare(self, *args, **kwargs)
        mask = inputs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            inputs = {**inputs, "attention_mask": mask.sort(dim=-1).values}
        return config, inputs

    return turned


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hf-cb-record", type=Path, required=True, help="the file that outcomes and calls are written to")
    parser.addoption("--hf-cb-install", action="store_true", help="install every model that generates")


def pytest_configure(config: pytest.Config) -> None:
    global _record
    _record = Record(config.getoption("--hf-cb-record"))
    if not config.getoption("--hf-cb-install"):
        return
    hf_cb.register_backend("compared", ComparedBackend)
    GenerationMixin.generate = _AtFirstUse(GenerationMixin.generate)  # type: ignore[assignment,method-assign]
    call = TextGenerationPipeline.__call__

    @functools.wraps(call)
    def installed_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, ServedPipeline):
            _install(self)
        return call(self, *args, **kwargs)

    TextGenerationPipeline.__call__ = installed_call  # type: ignore[method-assign]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mixin = getattr(sys.modules.get(MIXIN), "GenerationTesterMixin", None)
    if mixin is None:
        return
    mixin.prepare_config_and_inputs_for_generate = _turned(mixin.prepare_config_and_inputs_for_generate)
    others = [i for i in items if "/models/" in str(i.path) and not hasattr(mixin, getattr(i, "originalname", None) or i.name)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    _record.test = item.nodeid
    outcome = yield
    while _installed:
        reference, engine = _installed.pop()
        reasons = engine.stats().native_calls
        if reasons:
            _record.write(native_calls=reasons)
        model = reference()
        if model is not None and installed_backend(model) is not None:
            hf_cb.uninstall(model)
    return outcome


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        said = report.longrepr
        crash = getattr(said, "reprcrash", None)
        text = said[-1] if isinstance(said, tuple) else crash.message if crash is not None else said
        _record.write(outcome=report.outcome, said=str(text or "")[:2000])
