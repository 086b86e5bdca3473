"""GenerationBackend: what stands behind a model's `generate` while it is installed."""

from __future__ import annotations

import abc
import copy
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from transformers import Pipeline, PreTrainedModel
from typing_extensions import override

from hf_cb import forks
from hf_cb.blocking import holding
from hf_cb.config import CBConfig
from hf_cb.engine import Engine
from hf_cb.errors import NotInstalledError
from hf_cb.hf.calls import background
from hf_cb.hf.calls.seeds import seeded
from hf_cb.hf.calls.tokenizing import tokenizing
from hf_cb.request import Service

_live: weakref.WeakSet[GenerationBackend] = weakref.WeakSet()


class GenerationBackend(abc.ABC):
    """What answers `model.generate()` while it is installed.

    A subclass takes (model, config) and may hold the model only weakly: `self.model` gives it. `plain` runs the model's own
    `generate`.
    """

    engine: Engine | None = None  # what install() gives to the user

    def __init__(self, model: PreTrainedModel, config: CBConfig) -> None:
        self.config = config
        self._model = weakref.ref(model)
        self._own_generate: Callable[..., Any] | None = vars(model).get("generate")  # as models with custom code may have
        self.pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()  # that use it
        self.renew_locks()
        _live.add(self)

    def renew_locks(self) -> None:
        """Make the locks; anew in a forked child."""
        self._plain_lock = threading.RLock()  # plain generate is not thread-safe: one call at a time per model

    @property
    def model(self) -> PreTrainedModel:
        """The model this backend is for."""
        model = self._model()
        if model is None:
            raise NotInstalledError("the model of this backend no longer exists")
        return model

    @abc.abstractmethod
    def attach(self) -> None:
        """Make ready to serve. Raising leaves the model as it was."""

    @abc.abstractmethod
    def detach(self) -> None:
        """Finish what runs and let go of everything."""

    @abc.abstractmethod
    def why_not(self, call: dict[str, Any]) -> str | None:
        """Why a call with these arguments runs natively, as far as that can be told beforehand; None: it is served here."""

    @abc.abstractmethod
    def generate(self, arguments: dict[str, Any], seed: int | None, service: Service) -> Any:
        """Answer one call of `model.generate(**arguments)`; `service` says how soon and for whom."""

    def rows_in_flight(self, call: dict[str, Any]) -> int:
        """How many rows of such calls a pipeline may have underway from this thread; 1: one call at a time, on this thread."""
        return 1

    def plain(self, arguments: dict[str, Any], seed: int | None = None) -> Any:
        """The model's own generate, one call at a time. With a seed, torch's global generators are as they were afterwards."""
        if (tokenizer := arguments.get("tokenizer")) is not None:
            with tokenizing():  # others may be using it, and this call can't be made to wait for the lock where it does
                arguments = {**arguments, "tokenizer": copy.deepcopy(tokenizer)}
        with holding(self._plain_lock):
            if (own := background.current()) is not None:
                own.check()
                seed = own.seed if seed is None else seed
            if seed is None:
                return self.original(**arguments)
            with seeded(seed):
                return self.original(**arguments)

    @property
    def original(self) -> Callable[..., Any]:
        """The model's own `generate`, unlocked."""
        return self._own_generate or plain_generate(self.model)

    def restore(self, installed: object) -> GenerationBackend:
        """Make `vars(model)` what it was before `installed` was put there, unless somebody has put something in its place.

        Returns what stands behind `installed` from now on: plain generate, for whoever wrapped it.
        """
        attributes = vars(self.model)
        if attributes.get("generate") is installed:
            del attributes["generate"]
            if self._own_generate is not None:
                attributes["generate"] = self._own_generate
        plain = SerializedBackend(self.model, self.config)
        plain._own_generate = self._own_generate
        return plain


class SerializedBackend(GenerationBackend):
    """A lock round plain generate: what people do today, and the baseline to measure against."""

    @override
    def attach(self) -> None:
        pass

    @override
    def detach(self) -> None:
        pass

    @override
    def why_not(self, call: dict[str, Any]) -> str | None:
        return None

    @override
    def generate(self, arguments: dict[str, Any], seed: int | None, service: Service) -> Any:
        return self.plain(arguments, seed)


def plain_generate(model: Any) -> Callable[..., Any]:
    """The model's own `generate`, whatever is installed on it."""
    return types.MethodType(type(model).generate, model)


def _renew_locks() -> None:
    for backend in list(_live):
        backend.renew_locks()


forks.in_child(_renew_locks)
